"""One connection to Redis that many tasks share: what they send leaves together, replies are matched in order.

redis-py opens the connection (authentication, TLS, unix sockets); the bytes are read and written here, because a
command a round trip of its own costs several times the CPU of the message it carries.

Every flush ends with an ECHO of a fresh number. A reply that got lost on the way would shift all later ones to the
wrong command; the number makes that visible, the connection is replaced, and the unanswered commands are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any, ClassVar, Self

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from shared.bus.wire import Server
from shared.errors import BusUnavailable, Local2Error, TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

Command = tuple[Any, ...]
Reply = Any

# Errors that speak of the server's condition, not of the command: a new connection and another try will help.
CONDITIONS = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOSCRIPT", "UNBLOCKED")
_MAX_BACKOFF = 0.5
# Seconds after which a task that goes on is cancelled again.
_AGAIN = 0.5
# Longer than an answer takes nearby; from far away, flushes follow each other at this interval.
_LATE = 0.01


class ReplyError(Local2Error):
    """Redis refused a command. `code` is the first word of its answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.partition(" ")[0]


class OutOfMemory(TransientError):
    """Redis has reached its memory limit and refuses writes."""


class ConnectionLost(Local2Error):
    """The connection broke after the command was sent; whether it was carried out is not known."""


class Script:
    """A Lua script, loaded once per connection. All its keys share a hash slot."""

    known: ClassVar[dict[str, Script]] = {}

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
        Script.known[self.sha] = self

    def __call__(self, keys: Sequence[str], *args: Any) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


class _Unit:
    """Commands that are sent together and answered together."""

    __slots__ = ("block", "count", "future", "packed", "retry", "until")

    def __init__(
        self,
        packed: bytes,
        count: int,
        future: asyncio.Future[list[Reply]],
        retry: bool,
        block: float,
        until: float | None,
    ) -> None:
        self.packed = packed
        self.until = until
        self.count = count
        self.future = future
        self.retry = retry
        self.block = block


class _Batch:
    """The units of one flush, the replies so far, and the number that must come last."""

    __slots__ = ("expected", "expires", "marker", "replies", "units")

    def __init__(self, units: list[_Unit], marker: bytes, expires: float) -> None:
        self.units = units
        self.marker = marker
        self.replies: list[Reply] = []
        self.expected = sum(unit.count for unit in units) + 1
        self.expires = expires


class Link:
    """A self-healing connection.

    timeout: seconds without an expected reply after which the connection is replaced.
    """

    # Error replies that mean: replace the connection and send what it carried again.
    conditions: ClassVar[tuple[str, ...]] = CONDITIONS
    # Further commands of the handshake, behind CLIENT ID.
    greeting: ClassVar[tuple[Command, ...]] = ()

    def __init__(self, url: str, *, name: str, timeout: float = 5.0) -> None:
        self._url = url
        self._name = name
        self._timeout = timeout
        self._queue: deque[_Unit] = deque()
        self._inflight: deque[_Batch] = deque()
        self._transport: asyncio.WriteTransport | None = None
        self._flush_scheduled = False
        self._late: asyncio.TimerHandle | None = None
        self._counter = 0
        self._closing = False
        self._reason = ""
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.client_id = 0
        self.connected = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Begins to connect. Raises ValueError for a malformed URL."""
        self._pool = pool_of(self._url, self._timeout)
        self._task = asyncio.create_task(self._run(), name=f"link {self._name}")

    async def __aexit__(self, *_exc: object) -> None:
        self._closing = True
        assert self._task is not None
        await ended(self._task)
        self._fail_all(BusUnavailable("the bus is closed"))

    async def unblock(self, other: Link) -> bool:
        """Ends the blocking read that `other` waits in, a connection to the same server; False when there is none."""
        return bool(await self.call("CLIENT", "UNBLOCK", other.client_id))

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    async def call(self, *command: Any, retry: bool = True, block: float = 0.0) -> Reply:
        """One command's reply. Raises ReplyError, or ConnectionLost when `retry` is off.

        With `retry` the command is sent again after a reconnect: only for what may safely happen twice.
        block: seconds that the server may legitimately keep the reply back.
        """
        (reply,) = await self.submit((command,), retry, block=block)
        return checked(reply)

    async def pipe(self, commands: Sequence[Command], *, retry: bool = True, until: float | None = None) -> list[Reply]:
        """The replies of several commands, sent in order in one write. The first error among them is raised.

        until: the loop's time after which they are not sent (again); ConnectionLost is raised then.
        """
        replies = await self.submit(commands, retry, until=until)
        for reply in replies:
            checked(reply)
        return replies

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `pipe`, with errors as values (ReplyError) at their place."""
        return as_values(await self.submit(commands, True))

    def submit(
        self, commands: Sequence[Command], retry: bool, *, block: float = 0.0, until: float | None = None
    ) -> asyncio.Future[list[Reply]]:
        """The replies to come, error replies as the parser makes them; cancelled before it is sent, it never is."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Reply]] = loop.create_future()
        if self._closing:
            future.set_exception(BusUnavailable("the bus is closed"))
            return future
        packed = b"".join([hiredis.pack_command(command) for command in commands])
        self._queue.append(_Unit(packed, len(commands), future, retry, block, until))
        self._schedule(loop)
        return future

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        # While a flush is unanswered, what comes up waits for the next one: the server would not get to it earlier, and
        # a busy link would spend most of its time on system calls for a few commands each.
        if self._transport is None or self._flush_scheduled:
            return
        if not self._inflight:
            self._flush_scheduled = True
            loop.call_soon(self._flush)
        elif self._late is None:
            self._late = loop.call_later(_LATE, self._hurry)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._transport is not None and not self._inflight and (units := self._taken()):
            self._send(self._transport, units)

    def _hurry(self) -> None:
        """The answer is late. If it got lost, the number behind the next flush shows it now, not at the time-out."""
        self._late = None
        if self._transport is not None and self._inflight:
            self._send(self._transport, self._taken())

    def _taken(self) -> list[_Unit]:
        """What the queue holds and somebody still waits for."""
        now = asyncio.get_running_loop().time()
        for unit in self._queue:
            if unit.until is not None and now > unit.until and not unit.future.done():
                unit.future.set_exception(ConnectionLost("there was no connection to Redis in time"))
        # a caller that gave up before its command was sent must not find it carried out later
        units = [unit for unit in self._queue if not unit.future.done()]
        self._queue.clear()
        return units

    def _send(self, transport: asyncio.WriteTransport, units: list[_Unit]) -> None:
        loop = asyncio.get_running_loop()
        self._counter += 1
        marker = b"%d" % self._counter
        block = max((unit.block for unit in units), default=0.0)
        self._inflight.append(_Batch(units, marker, loop.time() + self._timeout + block))
        transport.write(b"".join([*(u.packed for u in units), hiredis.pack_command(("ECHO", marker))]))
        if units and not block and self._late is None:
            self._late = loop.call_later(_LATE, self._hurry)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        delay = 0.0
        while True:
            connection: AbstractConnection | None = None
            served = self.generation
            try:
                connection = _quiet(await self._connection())
                # redis-py's own limit does not cover the replies of its handshake
                async with asyncio.timeout(self._timeout):
                    await connection.connect()
                await self._serve(connection)
            except (OSError, RedisError, TimeoutError, hiredis.HiredisError, _Desync) as exc:
                self._report(str(exc) or type(exc).__name__, served)
            finally:
                self._transport = None
                self.connected.clear()
                if connection is not None:
                    _abort(connection)
            self._requeue()
            delay = 0.02 if self.generation > served else min(_MAX_BACKOFF, delay * 2 or 0.02)
            await asyncio.sleep(delay)

    async def server(self) -> Server:
        """The server to connect to now."""
        return Server.parse(self._url)

    async def _connection(self) -> AbstractConnection:
        """A connection to be opened, to the server that is asked now."""
        return self._pool.make_connection()

    def _check(self, replies: list[Reply]) -> None:
        """Looks at the replies of the handshake. Raises ConnectionError when this is the wrong server."""
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise ConnectionError(str(reply))

    def _report(self, reason: str, served: int) -> None:
        """Says once per outage, and once per new reason, that the connection is away."""
        if self.generation > served or reason != self._reason:
            log.warning("bus.connection_lost", link=self._name, reason=reason)
        self._reason = reason

    async def _serve(self, connection: AbstractConnection) -> None:
        """Receives replies until the connection breaks."""
        if connection._writer is None:
            raise ConnectionError("the connection closed during its handshake")
        wire = _Wire(connection._writer.transport)
        handshake = [("CLIENT", "ID"), *self.greeting, ("CLIENT", "SETNAME", self._name), *loading()]
        wire.transport.write(b"".join(hiredis.pack_command(command) for command in handshake))
        async with asyncio.timeout(self._timeout):
            replies = await wire.first(len(handshake))
        self._check(replies)
        self.client_id = int(replies[0])
        wire.receive = self._receive
        self._transport = wire.transport
        self.generation += 1
        self.connected.set()
        self._flush()
        watchdog = asyncio.create_task(self._watch(wire.transport))
        try:
            raise await wire.lost
        finally:
            watchdog.cancel()

    async def _watch(self, transport: asyncio.WriteTransport) -> None:
        """Breaks a connection on which a reply is overdue."""
        loop = asyncio.get_running_loop()
        suspect: _Batch | None = None
        while True:
            late = self._inflight[0] if self._inflight and loop.time() > self._inflight[0].expires else None
            if late is not None and late is suspect:
                transport.abort()
                return
            # after a pause of our own the answer may wait in the socket: it is read before the second look
            suspect = late
            await asyncio.sleep(self._timeout / 10)

    def _receive(self, reply: Reply) -> None:
        if not self._inflight:
            raise _Desync("a reply that nobody asked for")
        batch = self._inflight[0]
        batch.replies.append(reply)
        if len(batch.replies) < batch.expected:
            return
        if reply != batch.marker:
            raise _Desync("replies do not match their commands")
        for answer in batch.replies:
            if isinstance(answer, hiredis.ReplyError) and str(answer).startswith(self.conditions):
                raise ConnectionError(str(answer))
        self._inflight.popleft()
        start = 0
        for unit in batch.units:
            end = start + unit.count
            if not unit.future.done():
                unit.future.set_result(batch.replies[start:end])
            start = end
        if not self._inflight and self._late is not None:
            self._late.cancel()
            self._late = None
        if self._queue:
            # behind the tasks that have just been woken: what they send joins
            self._schedule(asyncio.get_running_loop())

    def _requeue(self) -> None:
        """Unanswered units go back to the head of the queue, in their order; those not to be repeated fail."""
        again: list[_Unit] = []
        while self._inflight:
            for unit in self._inflight.popleft().units:
                if unit.future.done():
                    continue
                if unit.retry:
                    again.append(unit)
                else:
                    unit.future.set_exception(ConnectionLost("the connection to Redis was lost"))
        self._queue.extendleft(reversed(again))

    def _fail_all(self, error: Local2Error) -> None:
        self._requeue()
        for unit in self._queue:
            if not unit.future.done():
                unit.future.set_exception(error)
        self._queue.clear()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels a task until it has ended. Raises what it ended with, unless that is the cancellation.

    Once is not always enough: a library that is connecting may swallow it when its own time-out ends at that moment.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN)
    with contextlib.suppress(asyncio.CancelledError):
        task.result()


def loading() -> list[Command]:
    """The commands that make every script known to a server."""
    return [("SCRIPT", "LOAD", script.source) for script in Script.known.values()]


def pool_of(url: str, timeout: float) -> ConnectionPool:
    """Makes connections to one server, without tries of their own. Raises ValueError for a malformed URL."""
    return ConnectionPool.from_url(url, protocol=2, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0))


class _Desync(Exception):
    pass


class _Wire(asyncio.Protocol):
    """Takes over an open connection: replies go to `receive` in the moment they arrive, without a task in between.

    lost: the reason, once the connection has ended or `receive` could not make sense of a reply.
    """

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.transport = transport
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.receive: Callable[[Reply], None] = self._unasked
        self._parser = hiredis.Reader()
        transport.set_protocol(self)

    async def first(self, count: int) -> list[Reply]:
        """The first replies. Raises what ended the connection before they came."""
        replies: list[Reply] = []
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(reply: Reply) -> None:
            replies.append(reply)
            if len(replies) == count:
                complete.set_result(None)
                self.receive = self._unasked

        self.receive = take
        either: set[asyncio.Future[Any]] = {complete, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not complete.done():
            raise self.lost.result()
        return replies

    def _unasked(self, _reply: Reply) -> None:
        raise _Desync("a reply that nobody asked for")

    def data_received(self, data: bytes) -> None:
        # whatever follows a reply that made no sense makes none either
        if self.lost.done():
            return
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not False:
                self.receive(reply)
        except Exception as exc:
            # handled where the connection is replaced; raised here it would end in the event loop's log
            self.lost.set_result(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(exc or ConnectionError("Redis closed the connection"))


def _quiet(connection: AbstractConnection) -> AbstractConnection:
    """Without redis-py's introduction of itself: on a bad network every round trip of a handshake is one that can fail.

    As attributes, because the arguments have other names in every major version.
    """
    connection.driver_info = connection.lib_name = connection.lib_version = None
    return connection


def _abort(connection: AbstractConnection) -> None:
    writer = connection._writer
    if writer is not None:
        writer.transport.abort()
    connection._reader = connection._writer = None


def refused(reply: Reply) -> str | None:
    """The text of an error reply."""
    return str(reply) if isinstance(reply, hiredis.ReplyError) else None


def as_values(replies: Sequence[Reply]) -> list[Reply]:
    """Replies with their errors as ReplyError."""
    return [ReplyError(str(reply)) if isinstance(reply, hiredis.ReplyError) else reply for reply in replies]


def checked(reply: Reply) -> Reply:
    """The reply. Raises the error that it is."""
    if isinstance(reply, hiredis.ReplyError):
        text = str(reply)
        raise OutOfMemory(text) if text.startswith("OOM") else ReplyError(text)
    return reply
