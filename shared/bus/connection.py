"""A self-healing connection to Redis that many tasks share.

Commands of one loop tick leave in one write, and replies are matched by their order. Every batch ends with an ECHO of a
fresh number: a reply that got lost on the way would shift all later ones to the wrong command. The number shows that,
the connection is replaced, and unanswered commands are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import hiredis
from redis.exceptions import RedisError

from shared.bus.clock import BusClock
from shared.bus.redis_connection import BusConnection, exchange, read_reply, reply_error
from shared.bus.replies import Command, ConnectionLost, Reply, ReplyError, checked, committed
from shared.bus.scripts import load_scripts
from shared.bus.server import Server
from shared.errors import BusUnavailable, Local2Error, PermanentError, SettingsError
from shared.telemetry.logging import get_logger

log = get_logger()

_NO_SCRIPTS = (
    "Redis does not have the scripts of the bus yet, and this user of it may not load them: "
    "the next participant that may (a gateway or generator of this release, say) does"
)
# Errors that describe the state of the server, not the command: another try on a new connection helps.
_CONDITIONS = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "NOSCRIPT", "UNBLOCKED", "BUSY")
)
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 0.5
# A server that answers later than this is of no use.
MAX_TIMEOUT_S = 5.0
# A task that survives its cancellation is cancelled again after this time.
_RECANCEL_S = 0.5
# Longer than an answer takes nearby; from far away, batches follow each other at this interval.
_FLUSH_DELAY_S = 0.01
# A link that carries less than this counts as broken.
_SLOWEST_BYTES_PER_S = 1_000_000
# A message of this size that breaks the connection so often is refused by something on the way.
_LARGE_BYTES = 1_000_000
MAX_ATTEMPTS = 5


@dataclass(eq=False, slots=True)
class _Request:
    """Commands that are sent together and answered together (see Connection.submit)."""

    packed: bytes
    count: int
    future: asyncio.Future[list[Reply]]
    retry: bool
    block: float
    until: float | None
    atomic: bool
    attempts: int = 0

    @property
    def size(self) -> int:
        return len(self.packed)

    @property
    def broken(self) -> int:
        """How often the connection broke over this request, if it is large."""
        return self.attempts if self.size > _LARGE_BYTES else 0

    def settle(self, replies: list[Reply]) -> None:
        if self.future.done():
            return
        try:
            self.future.set_result(committed(replies) if self.atomic else replies)
        except Local2Error as exc:
            self.future.set_exception(exc)

    def condition(self, replies: Sequence[Reply]) -> ReplyError | None:
        """Return the first reply that describes the state of the server."""
        if self.atomic and isinstance(replies[-1], list):
            replies = replies[-1]
        if ReplyError not in map(type, replies):
            return None
        return next((one for one in replies if isinstance(one, ReplyError) and one.code in _CONDITIONS), None)


@dataclass(slots=True)
class _Batch:
    """The requests of one write, their replies so far, and the number that must come last."""

    requests: list[_Request]
    marker: bytes
    block: float
    expires: float
    expected: int
    replies: list[Reply] = field(default_factory=list)


class Connection(contextlib.AbstractAsyncContextManager["Connection"]):
    """A self-healing connection to the server that has the bus.

    timeout: seconds without progress after which the connection is replaced. Each attempt in a row that gets no answer
    in time doubles it, up to MAX_TIMEOUT_S: on an overloaded machine no connection would ever be usable otherwise.
    clock: learns the server's time from every new connection.

    connected: set while there is a connection. generation: counts the connections. client_id: Redis' id of this one.
    """

    def __init__(self, server: Server, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        self._server = server
        self._name = name
        self._timeout = self._patience = timeout
        self._clock = clock or BusClock()
        self._queue: deque[_Request] = deque()
        self._inflight: deque[_Batch] = deque()
        # set when there is something to write
        self._writable = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None
        self._marker = 0
        self._ended: Local2Error | None = None
        self._reason = ""
        # whether the present connection has answered anything
        self._useful = False
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.client_id = 0
        self.connected = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"connection {self._name}")
        self._task.add_done_callback(self._on_end)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        if self._ended is None:
            self._ended = BusUnavailable("the bus is closed")
            with contextlib.suppress(SettingsError):
                await ended(self._task)
        self._fail_all()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Fail all pending and future commands, unless the connection was closed on purpose."""
        if self._ended is not None:
            return
        error = None if task.cancelled() else task.exception()
        if isinstance(error, SettingsError):
            self._ended = error
        else:
            log.error("bus.link_ended", link=self._name, exc_info=error)
            self._ended = PermanentError("the connection to Redis has ended by a fault of this program")
        self._fail_all()
        self.connected.set()

    @property
    def trouble(self) -> str:
        """Why the last connection was lost or could not be made; empty while there is one."""
        return "" if self.connected.is_set() else self._reason

    def dedicated(self, name: str) -> Connection:
        """Return a further connection to the same server, for a read that blocks; `async with` opens it."""
        return Connection(self._server, name=name, timeout=self._timeout, clock=self._clock)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, commands: Sequence[Command], retry: bool, *, block: float = 0.0, until: float | None = None,
        atomic: bool = False,
    ) -> asyncio.Future[list[Reply]]:  # fmt: skip
        """Return a future of the replies; error replies (ReplyError) are values.

        A future that is cancelled before its commands are sent keeps them from being sent.
        retry: send the commands again when the connection breaks; else the future raises ConnectionLost then, and the
        commands may have been carried out.
        block: seconds that the server may keep the replies back, as BLOCK says.
        until: the loop's time after which the commands are not sent (again); ConnectionLost is raised then.
        atomic: as one transaction, without the replies of MULTI and EXEC.
        """
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        if self._ended is not None:
            future.set_exception(self._closed())
            return future
        if atomic:
            commands = [("MULTI",), *commands, ("EXEC",)]
        # redis-py's own packing for asyncio is in Python, and takes eight times as long.
        packed = b"".join([hiredis.pack_command(command) for command in commands])
        self._queue.append(_Request(packed, len(commands), future, retry, block, until, atomic))
        self._schedule()
        return future

    async def call(self, *command: Any, retry: bool = True, block: float = 0.0) -> Reply:
        """Return one command's reply (see `submit`). Raises ReplyError, BusFull, BusUnavailable, ConnectionLost."""
        (reply,) = await self.submit((command,), retry, block=block)
        return checked(reply)

    async def pipe(self, commands: Sequence[Command], *, retry: bool = True) -> list[Reply]:
        """Return the replies of several commands, after all were carried out. Raise the first error among them."""
        return [checked(reply) for reply in await self.submit(commands, retry)]

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `pipe`; errors (ReplyError) are values."""
        return await self.submit(commands, True)

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        """Several writes as one transaction: all of them or none (see `submit`).

        The future raises BusFull or ReplyError when the server refused them. A command can still fail while it is
        carried out (a key of the wrong type): its ReplyError is then among the replies.
        """
        return self.submit(commands, retry, until=until, atomic=True)

    def _schedule(self) -> None:
        # While a batch is unanswered, new commands wait for the next one: a busy connection would spend most of its
        # time on system calls for a few commands each.
        if not self._inflight:
            self._writable.set()
        elif self._late is None:
            self._late = self._loop.call_later(_FLUSH_DELAY_S, self._on_late)

    def _on_late(self) -> None:
        # If the answer got lost, the number behind the next batch shows that now, not at the time-out.
        self._late = None
        self._writable.set()

    async def _write(self, connection: BusConnection) -> NoReturn:
        """Write batches of requests, one at a time unless an answer is late."""
        while True:
            await self._writable.wait()
            self._writable.clear()
            requests = self._take()
            if not requests and not self._inflight:
                continue
            if not connection.is_connected:
                # redis-py would open it again.
                self._queue.extendleft(reversed(requests))
                raise ConnectionError("Redis closed the connection")
            self._marker += 1
            marker = b"%d" % self._marker
            block = max([request.block for request in requests], default=0.0)
            limit = self._patience + block + sum([request.size for request in requests]) / _SLOWEST_BYTES_PER_S
            expected = sum([request.count for request in requests]) + 1
            self._inflight.append(_Batch(requests, marker, block, self._loop.time() + limit, expected))
            if requests and not block and self._late is None:
                self._late = self._loop.call_later(_FLUSH_DELAY_S, self._on_late)
            packed = [request.packed for request in requests]
            await connection.send_packed_command(
                [*packed, *connection.pack_command("ECHO", marker)], check_health=False
            )

    def _take(self) -> list[_Request]:
        """Empty the queue; return its requests that a caller still awaits."""
        now = self._loop.time()
        requests = []
        for request in self._queue:
            if request.future.done():
                continue
            if request.until is not None and now > request.until:
                request.future.set_exception(ConnectionLost("there was no connection to Redis in time", request.broken))
                continue
            requests.append(request)
        self._queue.clear()
        return requests

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────

    async def _read(self, connection: BusConnection) -> NoReturn:
        while True:
            reply = await read_reply(connection)
            if not self._inflight:
                raise ConnectionError("Redis sent a reply that belongs to no command")
            batch = self._inflight[0]
            batch.replies.append(reply)
            if len(batch.replies) == batch.expected:
                self._complete(batch)

    def _complete(self, batch: _Batch) -> None:
        """Give the replies of a batch to its requests. Raise ConnectionError when the connection must be replaced."""
        last = batch.replies.pop()
        if isinstance(last, ReplyError):
            # A busy server refuses ECHO too.
            raise ConnectionError(str(last))
        if last != batch.marker:
            raise ConnectionError("the replies of Redis do not match their commands")
        unserved, start, condition = list[_Request](), 0, None
        for request in batch.requests:
            replies = batch.replies[start : start + request.count]
            start += request.count
            if found := request.condition(replies):
                condition = condition or found
                unserved.append(request)
            else:
                request.settle(replies)
        if condition is not None:
            batch.requests = unserved
            raise ConnectionError(str(condition))
        self._inflight.popleft()
        self._useful = True
        if not self._inflight and self._late is not None:
            self._late.cancel()
            self._late = None
        if self._queue:
            self._schedule()

    async def _watch(self, connection: BusConnection) -> NoReturn:
        """Raise TimeoutError when a reply is overdue and no bytes move in either direction."""
        suspect: _Batch | None = None
        unsent, moved = 0, self._loop.time()
        while True:
            now = self._loop.time()
            # A long message on a slow line is no silence.
            before, unsent = unsent, connection.unsent_bytes
            if unsent < before or connection.received_at > moved:
                moved = now
            oldest = self._inflight[0] if self._inflight else None
            if oldest is not None and now > oldest.expires and now - moved > self._patience + oldest.block:
                if oldest is suspect:
                    raise TimeoutError(f"Redis has not answered for {self._patience:g} s")
                # After a pause of this process the answer may wait in the socket: it is read before the second look.
                suspect = oldest
            else:
                suspect = None
            await asyncio.sleep(self._timeout / 10)

    # ── connecting ───────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        delay = 0.0
        while True:
            generation, self._useful, slow = self.generation, False, False
            try:
                await self._connect_and_serve()
            except SettingsError:
                raise
            except Exception as exc:
                # Whatever a server answers, this goes on.
                slow = isinstance(exc, TimeoutError)
                reason = str(reply_error(exc) if isinstance(exc, RedisError) else exc)
                self._report(reason or f"no connection to Redis within {self._patience:g} s", generation)
                if reason.startswith("BUSY "):
                    await self._end_script()
            self._requeue()
            # A server that accepts connections and serves nothing is not asked faster than one that is away.
            delay = _FIRST_BACKOFF_S if self._useful else min(_MAX_BACKOFF_S, delay * 2 or _FIRST_BACKOFF_S)
            longest = max(MAX_TIMEOUT_S, self._timeout)
            self._patience = min(longest, self._patience * 2) if slow and not self._useful else self._timeout
            await asyncio.sleep(delay)

    async def _connect_and_serve(self) -> None:
        """One connection, from its beginning to its end. Raise what ended it; TimeoutError for no answer in time."""
        connection: BusConnection | None = None
        try:
            async with asyncio.timeout(self._patience):
                connection = await self._server.connect(self._patience)
                address = self._server.address
                await self._introduce(connection)
            self.generation += 1
            self.connected.set()
            self._writable.set()
            await _until_first_ends(*self._duties(connection), self._server.watch(address))
        finally:
            self.connected.clear()
            if connection is not None:
                await connection.disconnect()

    def _duties(self, connection: BusConnection) -> list[Coroutine[Any, Any, NoReturn]]:
        """Return what runs while there is a connection; each coroutine raises why the connection must end."""
        return [self._write(connection), self._read(connection), self._watch(connection)]

    async def _introduce(self, connection: BusConnection) -> None:
        """Learn this connection's id and the server's time, and load missing scripts."""
        asked = time.monotonic()
        client_id, named, now = await exchange(
            connection, [("CLIENT", "ID"), ("CLIENT", "SETNAME", self._name), ("TIME",)]
        )
        for reply in (client_id, named):
            if isinstance(reply, ReplyError):
                raise reply
        self.client_id = int(client_id)
        if not isinstance(now, ReplyError):
            self._clock.learn(now, asked)

        async def ask(commands: Sequence[Command]) -> list[Reply]:
            return await exchange(connection, commands)

        for reply in await load_scripts(ask):
            if isinstance(reply, ReplyError):
                raise ConnectionError(_NO_SCRIPTS if reply.code == "NOPERM" else str(reply))

    async def _end_script(self) -> None:
        """End the script that keeps Redis busy, if this user may and the script has written nothing yet."""
        # A busy server refuses SELECT.
        connection = self._server.unconnected(self._server.address, db=0)
        with contextlib.suppress(OSError, RedisError):
            async with asyncio.timeout(self._timeout):
                await connection.connect()
                (reply,) = await exchange(connection, [("SCRIPT", "KILL")])
            if not isinstance(reply, ReplyError):
                log.error("bus.script_ended", reason="it kept Redis from serving anybody for too long")
            elif reply.code == "UNKILLABLE":
                log.error("bus.script_cannot_be_ended", reason=str(reply))
        await connection.disconnect()

    def _report(self, reason: str, generation: int) -> None:
        """Log once per outage, and once per new reason, that there is no connection."""
        if self.generation > generation or reason != self._reason:
            log.warning("bus.connection_lost", link=self._name, reason=reason)
        self._reason = reason

    def _requeue(self) -> None:
        """Put unanswered requests back to the head of the queue; fail those that must not be repeated."""
        again: list[_Request] = []
        while self._inflight:
            for request in self._inflight.popleft().requests:
                if request.future.done():
                    continue
                request.attempts += 1
                if not request.retry:
                    request.future.set_exception(ConnectionLost("the connection to Redis was lost", request.broken))
                elif request.broken >= MAX_ATTEMPTS:
                    text = f"a message of {request.size} bytes broke the connection to Redis {request.broken} times"
                    request.future.set_exception(PermanentError(text))
                else:
                    again.append(request)
        self._queue.extendleft(reversed(again))

    def _fail_all(self) -> None:
        self._requeue()
        for request in self._queue:
            if not request.future.done():
                request.future.set_exception(self._closed())
        self._queue.clear()

    def _closed(self) -> Local2Error:
        """Return a new error: a raised one collects the frames that it passes."""
        assert self._ended is not None
        return type(self._ended)(str(self._ended))


async def _until_first_ends(*coroutines: Coroutine[Any, Any, NoReturn]) -> None:
    """Run coroutines until the first ends; cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


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
