"""Reports of a running stack about itself, for `local2 doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from services.cli.settings import ClientSettings

# Seconds for one request, and for a search that the stack makes.
_PATIENCE, _SEARCHING = 3.0, 8.0

Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` means that LoCAL2 cannot work like this; `remedy` is what to do."""

    about: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """parts: those of /ready. facts: of the replicas, by participant. search: the settings of web_search.

    facts and search are None if the key gives no access to them.
    """

    client: ClientSettings
    parts: dict[str, Any]
    facts: dict[str, list[dict[str, Any]]] | None
    search: dict[str, Any] | None

    def fact(self, participant: str) -> dict[str, Any]:
        """Return the facts of the first replica; empty without a replica, or if they are not known."""
        return next(iter((self.facts or {}).get(participant, [])), {})


async def running_stack(client: ClientSettings) -> RunningStack | None:
    """Return the stack at the client's address, also one that is not ready; None when none answers."""
    async with _http(client) as http:
        try:
            parts = (await http.get("/ready")).json()["parts"]
            if not isinstance(parts, dict):
                return None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None
        participants, search = await asyncio.gather(
            _read(http, "/participants"), _read(http, "/participants/web_search/settings")
        )
    facts = None
    if participants is not None and isinstance(participants.get("participants"), list):
        facts = {
            row["name"]: [replica.get("facts") or {} for replica in row["replicas"]]
            for row in participants["participants"]
        }
    return RunningStack(client, parts, facts, None if search is None else search.get("values"))


async def examine_running(stack: RunningStack) -> list[Finding]:
    """Return findings about the stack's bus, embedding model, judge and search, as far as the key gives access."""
    return [*_bus(stack), *_embedding(stack), *_judge(stack), *await _search(stack)]


def _bus(stack: RunningStack) -> Iterable[Finding]:
    part = stack.parts.get("bus")
    if not isinstance(part, dict):
        return
    if part.get("ok"):
        yield Finding("redis", "ok", "the bus of the running stack answers")
    else:
        remedy = "see the log of local2 run; in containers: docker compose logs redis"
        yield Finding("redis", "missing", f"the bus of the running stack: {part.get('reason')}", remedy)


def _embedding(stack: RunningStack) -> Iterable[Finding]:
    facts = stack.fact("memory")
    if not (name := facts.get("embedding_model")):
        return
    if facts.get("embedding_ok"):
        yield Finding(
            "embedding model", "ok", f"memory of the running stack uses {facts.get('embedding_in_use') or name}"
        )
    else:
        text = f"memory of the running stack: {facts.get('degraded') or f'{name} does not answer'}"
        yield Finding("embedding model", "note", text, "its own variables begin with LOCAL2_MEMORY_")


def _judge(stack: RunningStack) -> Iterable[Finding]:
    facts = stack.fact("critic")
    if not (name := facts.get("model")):
        return
    if facts.get("backend_ok"):
        yield Finding("judge", "ok", f"the critic of the running stack grades with {name} ({facts.get('backend')})")
    else:
        text = f"the critic of the running stack waits for {name}: {facts.get('backend_reason')}"
        yield Finding("judge", "note", text, "its own variables begin with LOCAL2_CRITIC_")


async def _search(stack: RunningStack) -> list[Finding]:
    about = "web search"
    if stack.facts is not None and not stack.facts.get("web_search"):
        return [Finding(about, "note", "no web_search of the running stack is there: answers come without a search")]
    if stack.search is None:
        text = "which service the running stack asks is shown for an administrator's key only"
        return [Finding(about, "note", text, "set LOCAL2_API_KEY to one")]
    provider = stack.search.get("provider")
    if provider == "mock":
        text = "the running stack searches by mock: canned hits, no real search"
        return [
            Finding(about, "note", text, "start it with LOCAL2_WEB_SEARCH_PROVIDER set, or with a SearXNG that runs")
        ]
    if provider != "searxng":
        # A search there may cost money.
        return [Finding(about, "ok", f"the running stack searches by {provider}")]
    place = stack.search.get("searxng_url")
    if trouble := await _search_trouble(stack.client):
        remedy = f"start SearXNG at {place}, or set BRAVE_API_KEY or TAVILY_API_KEY; everything else works without"
        return [Finding(about, "note", f"the running stack asks SearXNG: {trouble}", remedy)]
    return [Finding(about, "ok", f"the running stack searches by SearXNG at {place}")]


async def _search_trouble(client: ClientSettings) -> str | None:
    """Return why a search by the stack fails; None when it works. The worker may be in another network than the CLI."""
    async with _http(client) as http:
        try:
            asked = {"args": {"query": "local2"}}
            answer = await http.post("/tools/web_search/call", json=asked, timeout=_SEARCHING)
            found = answer.json()
        except (httpx.HTTPError, ValueError) as exc:
            return f"no answer ({str(exc) or type(exc).__name__})"
    trouble = found.get("error")
    return str(trouble["message"] if isinstance(trouble, dict) else trouble) if trouble else None


def _http(client: ClientSettings) -> httpx.AsyncClient:
    key = client.key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=_PATIENCE, trust_env=False)


async def _read(http: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """Return the JSON object of a successful answer, else None."""
    try:
        answer = await http.get(path)
        found = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return found if answer.is_success and isinstance(found, dict) else None
