"""Short questions to what is outside: does it answer, and what does it say of itself?"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from services.cli.settings import SearchConfig
from shared.bus import Bus
from shared.errors import Local2Error


async def redis_version(url: str, timeout: float = 2.0) -> str:
    """`Valkey 9.1` or the like. Raises Local2Error with the server's reason, where it has given one."""
    trouble = ""
    try:
        async with asyncio.timeout(timeout), Bus(url, "cli/probe", timeout=timeout) as bus:
            try:
                raw: bytes = await bus.link.call("INFO", "server")
            finally:
                trouble = bus.link.trouble
    except TimeoutError as exc:
        raise Local2Error(trouble or f"no answer within {timeout:g} s") from exc
    except ValueError as exc:
        raise Local2Error(str(exc)) from exc
    lines = dict(line.split(":", 1) for line in raw.decode().splitlines() if ":" in line)
    if "valkey_version" in lines:
        return f"Valkey {lines['valkey_version']}"
    return f"Redis {lines.get('redis_version', '(version unknown)')}"


@dataclass(frozen=True, slots=True)
class PortState:
    """`taken` by LoCAL2's own gateway is `gateway`; `refused`: this user may not listen there."""

    state: Literal["free", "gateway", "taken", "refused"]
    detail: str = ""


async def port_state(host: str, port: int) -> PortState:
    """What is on the port on which the gateway wants to listen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return PortState("free")
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            return PortState("refused", exc.strerror or str(exc))
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return PortState("gateway" if await is_gateway(url) else "taken")


async def is_gateway(url: str) -> bool:
    """Whether a LoCAL2 gateway answers there: it says of its parts whether they are ready."""
    try:
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:
            body = (await http.get(f"{url}/ready")).json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(body, dict) and isinstance(body.get("parts"), dict) and "bus" in body["parts"]


async def get_json(url: str, *, timeout: float = 3.0, headers: dict[str, str] | None = None, **params: Any) -> Any:
    """A page's JSON. Raises Local2Error with a sentence."""
    try:
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, headers=headers) as http:
            response = await http.get(url, params=params or None)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise Local2Error(f"no answer from {url} ({str(exc) or type(exc).__name__})") from exc
    if not response.is_success:
        raise Local2Error(f"{url} answered {response.status_code}")
    try:
        return response.json()
    except ValueError as exc:
        raise Local2Error(f"{url} did not answer with JSON") from exc


async def searxng_trouble(url: str, timeout: float = 5.0) -> str | None:
    """None when SearXNG answers searches in JSON, else what is wrong with it."""
    url = url.rstrip("/")
    try:
        await get_json(f"{url}/search", timeout=timeout, q="local2", format="json")
    except Local2Error as exc:
        if str(exc).endswith("answered 403"):
            return f"SearXNG at {url} refuses JSON: add `json` to search.formats in its settings.yml"
        return str(exc)
    return None


async def answers(url: str, timeout: float = 1.5) -> bool:
    """Whether any web server answers at the address."""
    try:
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http:
            await http.get(url)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


# Bytes that a first start writes before anything else does.
ROOM = 1 << 20


def writable(folder: Path) -> str | None:
    """None when files can be made in the folder (or it can be made), else why not."""
    existing = folder.absolute()
    try:
        if folder.is_symlink() and not folder.exists():
            return f"{folder} is a link that leads nowhere"
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            return f"{existing} is not a folder"
        # Permissions tell too little: a file system may be full or read-only, or make no folders for anybody.
        with (
            tempfile.TemporaryDirectory(prefix=".local2-", dir=existing) as place,
            (Path(place) / "room").open("wb") as file,
        ):
            file.write(bytes(ROOM))
            file.flush()
            os.fsync(file.fileno())
    except PermissionError:
        return f"no permission to write in {existing}"
    except OSError as exc:
        return f"nothing can be made in {existing} ({exc.strerror or exc})"
    return None


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """provider: the setting for web_search, None for its own. note: a sentence for the terminal."""

    provider: str | None
    note: str


async def choose_search(config: SearchConfig, asked: str | None) -> SearchChoice:
    """Return the service of the option, else of the settings, else SearXNG if it answers, else one that has a key."""
    if asked:
        return SearchChoice(asked, f"web search by {asked}")
    if config.provider:
        return SearchChoice(None, f"web search by {config.provider}")
    if await answers(config.searxng_url):
        return SearchChoice("searxng", f"web search by SearXNG at {config.searxng_url}")
    if config.brave_api_key:
        return SearchChoice("brave", "web search by Brave (SearXNG does not answer, BRAVE_API_KEY is set)")
    if config.tavily_api_key:
        return SearchChoice("tavily", "web search by Tavily (SearXNG does not answer, TAVILY_API_KEY is set)")
    return SearchChoice(
        None,
        f"no web search: SearXNG does not answer at {config.searxng_url}; searches will say that they failed "
        "(start SearXNG, set BRAVE_API_KEY or TAVILY_API_KEY, or try --search mock)",
    )
