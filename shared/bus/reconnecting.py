"""A connection to Redis that reconnects whenever it ends, with back-off and time limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, Self

from redis.exceptions import RedisError

from shared.bus.clock import BusClock
from shared.bus.redis_connection import BusConnection, exchange, reply_error
from shared.bus.replies import Command, Reply, ReplyError
from shared.bus.scripts import load_scripts
from shared.bus.server import Server
from shared.errors import BusUnavailable, Local2Error, PermanentError, SettingsError
from shared.telemetry.logging import get_logger

log = get_logger()

_NO_SCRIPTS = (
    "Redis does not have the scripts of the bus yet, and this user of Redis may not load them. "
    "Start a gateway or a generator of this release: it loads them"
)
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 0.5
# A server that answers later than this is of no use.
MAX_TIMEOUT_S = 5.0
# A task that survives its cancellation is cancelled again after this time.
_RECANCEL_S = 0.5


class Reconnecting(contextlib.AbstractAsyncContextManager["Reconnecting"]):
    """A connection to the server that has the bus. It reconnects whenever it ends; a subclass uses it (`serve`).

    timeout: seconds without progress after which the connection is replaced. patience: the same for the present
    connection. Each attempt in a row that gets no answer in time doubles it, up to MAX_TIMEOUT_S: on an overloaded
    machine no connection would ever be usable otherwise.
    clock: set to the server's time by every new connection.

    connected: set while there is a connection. generation: counts the connections. client_id: Redis' id of this one.
    useful: whether this connection has served anything; set by the subclass.
    """

    def __init__(self, server: Server, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        self.server = server
        self.name = name
        self.timeout = self.patience = timeout
        self.clock = clock or BusClock()
        self._ended: Local2Error | None = None
        self._reason = ""
        self._task: asyncio.Task[None] | None = None
        self.useful = False
        self.generation = 0
        self.client_id = 0
        self.connected = asyncio.Event()

    @abstractmethod
    async def serve(self, connection: BusConnection) -> NoReturn:
        """Use a new connection. Raise the error for which it must end."""

    def on_disconnect(self) -> None:
        """Called after each connection."""

    def on_end(self) -> None:
        """Called when there will be no further connection (see `closed`)."""

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"connection {self.name}")
        self._task.add_done_callback(self._on_task_end)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        if self._ended is None:
            self._ended = BusUnavailable("the bus is closed")
            with contextlib.suppress(SettingsError):
                await ended(self._task)
        self.on_end()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """End for good, unless the connection was closed on purpose."""
        if self._ended is not None:
            return
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SettingsError):
            self._ended = error
        else:
            log.error("bus.link_ended", link=self.name, exc_info=error)
            self._ended = PermanentError("the connection to Redis has ended by a fault of this program")
        self.on_end()
        self.connected.set()

    @property
    def closed(self) -> Local2Error | None:
        """Why there will be no further connection, as a new error: a raised one collects the frames that it passes."""
        return None if self._ended is None else type(self._ended)(str(self._ended))

    @property
    def trouble(self) -> str:
        """Why the last connection was lost or could not be made; empty while there is one."""
        return "" if self.connected.is_set() else self._reason

    async def _run(self) -> None:
        delay = 0.0
        while True:
            generation, self.useful, slow = self.generation, False, False
            try:
                await self._connect_and_serve()
            except SettingsError:
                raise
            except Exception as exc:
                # No answer of a server ends this loop.
                slow = isinstance(exc, TimeoutError)
                reason = str(reply_error(exc) if isinstance(exc, RedisError) else exc)
                self.report(
                    reason or f"no connection to Redis within {self.patience:g} s", again=self.generation > generation
                )
                if reason.startswith("BUSY "):
                    await self._end_script()
            self.on_disconnect()
            # A server that accepts connections and serves nothing gets no more attempts than one that is away.
            delay = _FIRST_BACKOFF_S if self.useful else min(_MAX_BACKOFF_S, delay * 2 or _FIRST_BACKOFF_S)
            longest = max(MAX_TIMEOUT_S, self.timeout)
            self.patience = min(longest, self.patience * 2) if slow and not self.useful else self.timeout
            await asyncio.sleep(delay)

    async def _connect_and_serve(self) -> None:
        """Open a connection and serve it until it ends. Raise the error that ended it; TimeoutError after no answer."""
        connection: BusConnection | None = None
        try:
            async with asyncio.timeout(self.patience):
                connection = await self.server.connect(self.patience)
                address = self.server.address
                await self._introduce(connection)
            self.generation += 1
            self.connected.set()
            await until_first_ends(self.serve(connection), self.server.watch(address))
        finally:
            self.connected.clear()
            if connection is not None:
                await connection.disconnect()

    async def _introduce(self, connection: BusConnection) -> None:
        """Read this connection's id and the server's time, and load missing scripts."""
        asked = time.monotonic()
        client_id, named, now = await exchange(
            connection, [("CLIENT", "ID"), ("CLIENT", "SETNAME", self.name), ("TIME",)]
        )
        for reply in (client_id, named):
            if isinstance(reply, ReplyError):
                raise reply
        self.client_id = int(client_id)
        if not isinstance(now, ReplyError):
            self.clock.learn(now, asked)

        async def ask(commands: Sequence[Command]) -> list[Reply]:
            return await exchange(connection, commands)

        for reply in await load_scripts(ask):
            if isinstance(reply, ReplyError):
                raise ConnectionError(_NO_SCRIPTS if reply.code == "NOPERM" else str(reply))

    async def _end_script(self) -> None:
        """End the script that keeps Redis busy, if this user may and the script has written nothing yet."""
        # A busy server refuses SELECT.
        connection = self.server.unconnected(self.server.address, db=0)
        with contextlib.suppress(OSError, RedisError):
            async with asyncio.timeout(self.timeout):
                await connection.connect()
                (reply,) = await exchange(connection, [("SCRIPT", "KILL")])
            if not isinstance(reply, ReplyError):
                log.error("bus.script_ended", reason="it kept Redis busy for too long")
            elif reply.code == "UNKILLABLE":
                log.error("bus.script_cannot_be_ended", reason=str(reply))
        await connection.disconnect()

    def report(self, reason: str, *, again: bool = False) -> None:
        """Log why the server does not serve this connection, unless that was the last reason. again: in any case."""
        if again or reason != self._reason:
            log.warning("bus.connection_lost", link=self.name, reason=reason)
        self._reason = reason


async def until_first_ends(*coroutines: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Run coroutines until the first ends; cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise next(error for task in done if (error := task.exception()) is not None)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended. Raise its error, unless that is the cancellation.

    Once is not always enough: a library that is connecting may swallow the cancellation when its own time-out ends at
    that moment.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_RECANCEL_S)
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
