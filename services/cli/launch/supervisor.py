"""`local2 run`: the whole stack on this machine, started in order, kept alive, stopped without leaving anything."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from services.cli.launch.child import Backoff, Child, ChildSpec
from services.cli.launch.embedded_redis import EmbeddedRedis
from services.cli.launch.log_view import LogView
from services.cli.launch.parent_death_pipe import ParentDeathPipe
from services.cli.launch.plan import python
from services.cli.launch.redis_supervisor import RedisSupervisor
from services.cli.words import reasons
from shared.errors import Local2Error
from shared.participant import store_marker

T = TypeVar("T")

# A participant that dies so often before the stack has answered once is broken, not unlucky.
MAX_START_FAILURES = 3
DEMO_START = 180.0
# What a participant may take after `drain` to hand over what it holds and to say good-bye.
LEAVING = 6.0


def grace(drain: float) -> float:
    """Seconds between SIGTERM and SIGKILL: more than a participant with this `drain` ever needs."""
    return drain + LEAVING + 2.0


class StartError(Local2Error):
    """The stack cannot be started; the text says what to do."""


@dataclass(slots=True)
class Supervisor:
    """Everything that runs. `async with` stops it all at the end, in the reverse order."""

    view: LogView
    data_dir: Path
    grace: float = grace(5.0)
    backoff: Backoff = field(default_factory=Backoff)
    _pipe: ParentDeathPipe = field(init=False)
    _redis: RedisSupervisor | None = None
    _demo: Child | None = None
    _children: list[Child] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _broken: asyncio.Future[str] = field(init=False)
    _ready: bool = False

    async def __aenter__(self) -> Supervisor:
        self._broken = asyncio.get_running_loop().create_future()
        self._pipe = ParentDeathPipe(self.data_dir, math.ceil(self.grace))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        found = {child.spec.name: child.pid for child in self._children}
        if self._demo is not None:
            found[self._demo.spec.name] = self._demo.pid
        if self._redis is not None:
            found["redis"] = self._redis.pid
        return {name: pid for name, pid in found.items() if pid is not None}

    async def start_redis(self, appendfsync: str = "everysec") -> str:
        """The URL of the embedded server. Raises EmbeddedRedisError."""
        # An orphan of a supervisor that was killed may still hold the folder: it is used and supervised.
        server = EmbeddedRedis(self.data_dir / "redis", reuse=True, extra={"appendfsync": appendfsync})
        self._redis = RedisSupervisor(server, self.view.writer("redis"), backoff=self.backoff)
        url = await self._redis.start()
        store_marker.mark_created(server.data_dir)
        self._keep(self._redis.run(), "redis")
        return url

    async def start_demo_model(self, argv: Sequence[str] | None = None) -> tuple[str, str]:
        """URL and model name of the demonstration model. Raises StartError."""
        announced: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        write = self.view.writer("demo-model")

        def output(line: str) -> None:
            try:
                said = json.loads(line)
                said["url"]
            except (ValueError, TypeError, KeyError):
                write(line)
                return
            # After a restart it says the same again.
            if not announced.done():
                announced.set_result(said)

        command = argv or python("services.demo_model")
        child = self._child(ChildSpec("demo-model", [*command, "--port", "0"]), on_output=output)
        self._demo = child
        self._keep(child.run(), "demo-model")
        said = await self._unless_broken(announced, DEMO_START, "the demonstration model")
        url = str(said["url"])
        models = said.get("models")
        # What is started again must answer at the address that the participants know.
        child.spec = ChildSpec("demo-model", [*command, "--port", str(urlsplit(url).port)])
        return url, str(models[0]) if isinstance(models, list) and models else "demo"

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Starts the participants."""
        for spec in specs:
            child = self._child(spec)
            self._children.append(child)
            self._keep(child.run(), spec.name)

    async def wait_until_ready(self, url: str, *, quiet: float = 5.0) -> None:
        """Returns when GET /ready says so; tells what is missing when that takes long. Raises StartError."""
        await self._unless_broken(asyncio.ensure_future(self._poll_ready(url, quiet)), None, "the stack")
        self._ready = True

    async def _poll_ready(self, url: str, quiet: float) -> None:
        loop = asyncio.get_running_loop()
        told, speak_at = "", loop.time() + quiet
        async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as http:
            while True:
                try:
                    response = await http.get("/ready")
                    if response.status_code == 200:
                        return
                    missing = "; ".join(reasons(response)) or f"/ready answered {response.status_code}"
                except httpx.HTTPError as exc:
                    missing = f"the gateway does not answer yet ({type(exc).__name__})"
                if missing != told and loop.time() >= speak_at:
                    self.view.say(f"not ready yet: {missing}")
                    told = missing
                await asyncio.sleep(0.1)

    def _keep(self, running: Coroutine[Any, Any, None], name: str) -> None:
        """Supervises a process from now on; that it no longer does is said at once."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.view.say(f"{name} is no longer supervised ({error!r}): stop with Ctrl-C and start again")

        task = asyncio.create_task(running, name=name)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _unless_broken(self, wanted: asyncio.Future[T], timeout: float | None, what: str) -> T:
        try:
            both: set[asyncio.Future[Any]] = {wanted, self._broken}
            await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                return wanted.result()
            raise StartError(self._broken.result() if self._broken.done() else f"{what} did not start in time")
        finally:
            wanted.cancel()

    def _child(self, spec: ChildSpec, on_output: Callable[[str], None] | None = None) -> Child:
        name = spec.name

        def ended(_status: int) -> None:
            child = next(c for c in [*self._children, self._demo] if c is not None and c.spec.name == name)
            if not self._ready and child.failures >= MAX_START_FAILURES and not self._broken.done():
                last = self.view.last.get(name, "it said nothing")
                self._broken.set_result(f"{name} does not start: {last}")

        return Child(spec, self._pipe, self.view.writer(name), backoff=self.backoff, on_output=on_output, on_end=ended)

    async def _stop(self) -> None:
        """Participants first, then the model, then Redis: what is in flight can still be handed over."""
        await asyncio.gather(*(child.stop(self.grace) for child in self._children))
        if self._demo is not None:
            await self._demo.stop(self.grace)
        if self._redis is not None:
            self._redis.ask_to_stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._redis is not None:
            await self._redis.stop()
        self._pipe.close()


async def until_signal(work: Callable[[asyncio.Event], asyncio.Future[None]]) -> None:
    """Runs `work` until it ends or SIGINT or SIGTERM comes; the event tells it that one came."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    working = work(stop)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        both: set[asyncio.Future[Any]] = {working, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
