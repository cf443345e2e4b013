"""The order of work of `local2 run`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
from rich.console import Console

from services.cli.launch.console_build import CannotBuild, build_apart
from services.cli.launch.console_build import Console as WebConsole
from services.cli.launch.embedded_redis import can_start
from services.cli.launch.extras import missing_extras
from services.cli.launch.log_view import LogView
from services.cli.launch.models import ModelChoice, Wanted, choose_model, demo_env, instead_of_demo, late_model
from services.cli.launch.parent_death_pipe import REDIS_ENDS
from services.cli.launch.plan import MODEL_USERS, PARTICIPANTS, RunOptions, participants
from services.cli.launch.probes import choose_search, port_state, redis_version, writable
from services.cli.launch.pull_view import PullView
from services.cli.launch.run_lock import UnusableFolder, run_lock
from services.cli.launch.supervisor import StartError, Supervisor, grace, until_signal
from services.cli.settings import (
    ClientSettings,
    CriticConfig,
    DrainConfig,
    McpConfig,
    MemoryConfig,
    ModelConfig,
    SearchConfig,
)
from services.cli.words import reasons, typed
from shared.bus.server import Server
from shared.errors import Local2Error, SettingsError
from shared.extras import advice
from shared.llm.settings import BackendSettings
from shared.participant.settings import misspelt_sections


class Run:
    """One run of the stack.

    client: how the stack will be reached.
    redis_url: the configured bus, None for the embedded one.
    """

    def __init__(self, options: RunOptions, client: ClientSettings, redis_url: str | None) -> None:
        self._options = options
        self._client = client
        self._redis_url = redis_url
        self._terminal = not options.headless and sys.stderr.isatty()
        self._view = LogView(colour=self._terminal)
        self._console = Console(stderr=True) if self._terminal else None

    async def until_stopped(self) -> None:
        """Raises Local2Error when the stack cannot be started."""
        # whose servers are named in the settings
        options = self._options = replace(self._options, mcp=bool(McpConfig.load("mcp").servers))
        if trouble := writable(options.data_dir):
            raise UnusableFolder(options.data_dir, trouble)
        self._check_settings()
        # The folder first: a second run on it is told about that, not about its port.
        seconds = grace(longest_drain())
        async with run_lock(options.data_dir, seconds + REDIS_ENDS, self._view.say):
            await self._check_port()
            async with Supervisor(self._view, options.data_dir, seconds) as supervisor:
                try:
                    await until_signal(lambda stop: asyncio.ensure_future(self._serve(supervisor, stop)))
                finally:
                    self._view.say("stopping")
        self._view.say("stopped")

    def _check_settings(self) -> None:
        """Raise SettingsError for settings with which no participant could start, or none could answer."""
        if wrong := misspelt_sections([*PARTICIPANTS, "cli"]):
            raise SettingsError("; ".join(wrong))
        if missing := missing_extras():
            raise SettingsError(f"the settings need packages that are not installed; {advice(*missing)}")
        if self._redis_url:
            Server(self._redis_url)
        config = self._model_config()
        if config.backend == "google_genai" and "model" not in config.model_fields_set:
            raise SettingsError("LOCAL2_BACKEND=google_genai has no default model: name one in LOCAL2_MODEL")

    def _model_config(self) -> ModelConfig:
        return ModelConfig.load("generator", {"model": self._options.model} if self._options.model else None)

    async def _serve(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        options, say = self._options, self._view.say
        if not self._redis_url:
            # what is missing is better told before a model is pulled
            await asyncio.to_thread(can_start, options.data_dir / "redis")
        config = self._model_config()
        wanted = self._wanted(config)
        with PullView(say, self._console) as progress:
            choice = await choose_model(config, wanted, say, progress)
        for note in choice.notes:
            say(note)
        models = await self._demo(supervisor, config) if choice.demo else {}
        search = await choose_search(SearchConfig.load("web_search"), options.search)
        say(search.note)
        # last, so that it is never without a participant, which ends it when this process was killed
        redis_url = await self._bus(supervisor)
        supervisor.start(participants(options, redis_url, models, search.provider))
        async with _beside(self._later(config, wanted, choice)) as later, contextlib.AsyncExitStack() as beside:
            client = self._client
            await supervisor.wait_until_ready(client.base_url)
            # a link works for a minute, and a console that is being built takes longer
            there = not WebConsole().here or WebConsole().current
            say(await welcome(client, with_link=self._terminal and there))
            if not there and not options.headless:
                await beside.enter_async_context(_beside(self._console_built()))
            stopping = asyncio.ensure_future(tell_what_lacks(client.base_url, say, stop))
            await asyncio.wait({stopping, later}, return_when=asyncio.FIRST_COMPLETED)
            if later.done():
                # its own failure ends the run, and its own end does not
                later.result()
            await stopping

    async def _later(self, config: ModelConfig, wanted: Wanted, choice: ModelChoice) -> None:
        """What an Ollama brings that comes after the start."""
        if choice.away:
            with PullView(self._view.say, self._console) as progress:
                await late_model(config, wanted, self._view.say, progress)
        elif choice.demo:
            await instead_of_demo(config, self._view.say)

    async def _console_built(self) -> None:
        """The web console, once it is built; a stack without it is told what is missing."""
        try:
            await build_apart(WebConsole(), self._view.say)
        except CannotBuild as exc:
            self._view.say(f"console: not built: {exc}")
            return
        self._view.say(await console_line(self._client, with_link=self._terminal))

    async def _bus(self, supervisor: Supervisor) -> str:
        if not self._redis_url:
            url = await supervisor.start_redis(self._client.redis_appendfsync)
            self._view.say(f"bus: embedded Redis server, data in {self._options.data_dir / 'redis'}")
            return url
        try:
            self._view.say(f"bus: {await redis_version(self._redis_url)} of LOCAL2_REDIS_URL")
        except Local2Error as exc:
            self._view.say(f"bus: the Redis of LOCAL2_REDIS_URL cannot be used ({exc}); waiting for it")
        return self._redis_url

    def _wanted(self, config: ModelConfig) -> Wanted:
        """What the Ollama of respondent A is to have; those of others are asked by the others."""
        remembering, judging = MemoryConfig.load("memory"), CriticConfig.load("critic")
        second = ModelConfig.load("respondent-b")
        models = [config.model]
        if self._options.respondent_b and _same_server(second, config):
            models.append(self._options.model_b or self._options.model or second.model)
        if _same_server(remembering, config):
            models.append(remembering.embedder)
        judge = judging.model if _same_server(judging, config) else None
        return Wanted(models, judge, named=config.named or self._options.model_b is not None)

    async def _demo(self, supervisor: Supervisor, config: ModelConfig) -> dict[str, str]:
        say = self._view.say
        say("starting the demonstration model instead: it is small, proves that the stack works, and knows little")
        url, model = await supervisor.start_demo_model()
        say(f"DEMO MODEL {model} answers, not {config.model}; start Ollama for real use")
        others = "respondent B and the judge" if self._options.respondent_b else "the judge"
        say(f"it is {others} too: expect no grades, its judgements can hardly ever be read")
        # who has a server of its own keeps it
        return demo_env(url, model, [user for user in MODEL_USERS if _same_server(ModelConfig.load(user), config)])

    async def _check_port(self) -> None:
        host, port = self._options.api_host, self._options.api_port
        found = await port_state(host, port)
        other = f"choose another port: {typed('run', '--api-port', str(port + 1 if port < 65_535 else 8765))}"
        match found.state:
            case "gateway":
                raise StartError(f"port {port} on {host} is in use: a LoCAL2 gateway already answers there; {other}")
            case "taken":
                raise StartError(f"port {port} on {host} is in use by another program; {other}")
            case "refused":
                raise StartError(f"cannot listen on port {port} of {host} ({found.detail}); {other}")


async def tell_what_lacks(base_url: str, say: Callable[[str], None], stop: asyncio.Event, *, look: float = 5.0) -> None:
    """Until `stop`: says what a stack that answers does without (memory), each time that it is something else.

    look: seconds between two looks; what is only passing is not said.
    """
    seen = told = ""
    async with httpx.AsyncClient(base_url=base_url, timeout=look, trust_env=False) as http:
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                ready = await http.get("/ready")
                now = "; ".join(reasons(ready)) if ready.status_code == 200 else told
                if now == seen and now != told:
                    say(f"it answers, without all of its {now}" if now else "nothing is missing any more")
                    told = now
                seen = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look):
                    await stop.wait()


def longest_drain() -> float:
    """The most that any participant may take to finish its work."""
    return max(DrainConfig.load(name).drain for name in PARTICIPANTS)


def _same_server(one: BackendSettings, other: BackendSettings) -> bool:
    return (one.backend, one.address) == (other.backend, other.address)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Runs the work beside the block, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _where(settings: ClientSettings) -> str:
    """What a command needs before it to find this stack: nothing when it would look there anyway."""
    usual = ClientSettings.load("cli")
    words = []
    if settings.base_url != usual.base_url:
        words.append(f"LOCAL2_API_URL={shlex.quote(settings.base_url)} ")
    if settings.data_dir.absolute() != usual.data_dir.absolute():
        words.append(f"LOCAL2_DATA_DIR={shlex.quote(str(settings.data_dir))} ")
    return "".join(words)


async def welcome(settings: ClientSettings, *, with_link: bool = False) -> str:
    """What to do with a stack that is ready.

    with_link: the console's address opens it, once, within a minute. Only for a terminal: logs are kept and passed on.
    """
    base = settings.base_url
    first = await console_line(settings, with_link=with_link)
    given = next((name for name in ("LOCAL2_API_KEY", "LOCAL2_ADMIN_KEY") if os.environ.get(name)), None)
    if settings.admin_key is not None or settings.api_key is not None:
        key, shown = f"${given}", f"the key in {given}"
        if given is None:
            key, shown = "KEY", "the one that is configured (instead of KEY below)"
    else:
        key, shown = f"$(cat {shlex.quote(str(settings.admin_key_path))})", str(settings.admin_key_path)
    return "\n".join(
        [
            "ready",
            f"  {first}",
            f"  admin key: {shown}",
            f'  try: {_where(settings)}{typed("ask")} "What is the capital of France?"',
            f'  or:  curl -s {base}/query -H "Authorization: Bearer {key}" \\',
            """         -H 'Content-Type: application/json' -d '{"query": "What is the capital of France?"}'""",
        ]
    )


async def console_line(settings: ClientSettings, *, with_link: bool) -> str:
    """Where the console is; where none is served, where the API is."""
    base = settings.base_url
    async with httpx.AsyncClient(base_url=base, timeout=5.0, trust_env=False) as http:
        try:
            page = (await http.get("/", headers={"accept": "text/html"})).headers.get("content-type", "")
        except httpx.HTTPError:
            page = ""
        served = page.startswith("text/html")
        path = await _link(http, settings) if served and with_link else "/"
    once = f" (works once, for a minute; another one: {_where(settings)}{typed('keys', 'link')})" if path != "/" else ""
    return f"console: {base}{path}{once}" if served else f"API: {base} (its description: {base}/openapi.json)"


async def _link(http: httpx.AsyncClient, settings: ClientSettings) -> str:
    """The path that opens the console without a key; the plain one when the gateway gives none."""
    key = settings.key()
    try:
        made = await http.post("/keys/link", headers={"Authorization": f"Bearer {key}"} if key else {})
        return str(made.json()["path"]) if made.status_code == 201 else "/"
    except (httpx.HTTPError, ValueError, KeyError):
        return "/"
