"""One connection to Redis that many tasks share: what they send leaves together, replies are matched in order.

Bytes are written and read here, because a command a round trip of its own costs several times the CPU of the message it
carries. Every flush ends with an ECHO of a fresh number. A reply that got lost on the way would shift all later ones to
the wrong command; the number makes that visible, the connection is replaced, and unanswered commands are sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

from shared.bus.clock import BusClock
from shared.bus.endpoint import Server
from shared.bus.port import Command, ConnectionLost, Port, Reply, ReplyError, committed, load_scripts
from shared.bus.wire import Desync, Wire, open_wire, packed
from shared.errors import BusUnavailable, Local2Error, PermanentError
from shared.telemetry.logging import get_logger

log = get_logger()

_NO_SCRIPTS = (
    "Redis does not have the scripts of the bus yet, and this user of it may not load them: "
    "the next participant that may (a gateway or generator of this release, say) does"
)
# Errors that speak of the server's condition, not of the command: a new connection and another try will help.
CONDITIONS = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOSCRIPT", "UNBLOCKED", "BUSY")
_FIRST_BACKOFF = 0.02
_MAX_BACKOFF = 0.5
# Seconds; a server that answers later than this is of no use.
MOST_PATIENCE = 5.0
# Seconds after which a task that goes on is cancelled again.
_AGAIN = 0.5
# Longer than an answer takes nearby; from far away, flushes follow each other at this interval.
_LATE = 0.01
# What waits leaves beside so many unanswered flushes when it is this large (bytes): Redis, and whom it wakes, work on
# the one while the next is prepared.
_WORTH = 8_000
_ABREAST = 4
# What is not even carried this fast (bytes a second) is taken for lost.
_SLOWEST = 1_000_000
# A large message that breaks the connection this often is refused by something on the way.
_LARGE = 1_000_000
MOST_TRIES = 5


@dataclass(eq=False, slots=True)
class _Unit:
    """Commands that are sent together and answered together."""

    packed: bytes
    count: int
    future: asyncio.Future[list[Reply]]
    retry: bool
    block: float
    until: float | None
    atomic: bool
    tries: int = 0

    @property
    def broken(self) -> int:
        """How often the connection broke over it, if it is large."""
        return self.tries if len(self.packed) > _LARGE else 0

    def settle(self, replies: list[Reply]) -> None:
        if not self.atomic:
            self.future.set_result(replies)
            return
        try:
            self.future.set_result(committed(replies))
        except Local2Error as exc:
            self.future.set_exception(exc)


class _Batch:
    """The units of one flush, the replies so far, and the number that must come last."""

    def __init__(self, units: list[_Unit], marker: bytes, block: float, expires: float) -> None:
        self.units = units
        self.marker = marker
        self.replies: list[Reply] = []
        self.expected, self.atomic = 1, False
        for unit in units:
            self.expected += unit.count
            self.atomic = self.atomic or unit.atomic
        self.block = block
        self.expires = expires


class Link(Port):
    """A self-healing connection to one server (see Port).

    timeout: seconds without a sign of progress after which the connection is replaced. Where each answer takes longer,
    as on a machine that has too much to do, no connection would ever be of use: the next one is given twice the time.
    clock: is told the server's time with every new connection.
    """

    one_server: ClassVar[bool] = True
    # Error replies that mean: replace the connection and send what it carried again.
    conditions: ClassVar[tuple[str, ...]] = CONDITIONS
    # Further commands of the handshake, behind CLIENT ID.
    greeting: ClassVar[tuple[Command, ...]] = ()

    def __init__(self, server: Server, *, name: str, timeout: float = 5.0, clock: BusClock | None = None) -> None:
        self._server = server
        self._name = name
        self._timeout = timeout
        self._clock = clock or BusClock()
        self._queue: deque[_Unit] = deque()
        # bytes of what has been added since the last flush
        self._queued = 0
        self._inflight: deque[_Batch] = deque()
        self._wire: Wire | None = None
        # to where it was opened
        self._at = server
        self._flush_scheduled = False
        self._late: asyncio.TimerHandle | None = None
        self._counter = 0
        self._closing = False
        self._broken = False
        self._reason = ""
        # whether the present connection has answered anything, and the seconds that it may take to
        self._useful: bool
        self._patience = timeout
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.client_id = 0
        self.connected = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Begins to connect."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"link {self._name}")
        self._task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Nobody carries anything any more: where that was not asked for, whoever waits is told, and whoever comes."""
        if self._closing:
            return
        self._closing = self._broken = True
        log.error("bus.link_ended", link=self._name, exc_info=None if task.cancelled() else task.exception())
        self._fail_all()
        self.connected.set()

    def _closed(self) -> Local2Error:
        if self._broken:
            return PermanentError("the connection to Redis has ended by a fault of this program")
        return BusUnavailable("the bus is closed")

    async def __aexit__(self, *_exc: object) -> None:
        self._closing = True
        assert self._task is not None
        if not self._broken:
            await ended(self._task)
        self._fail_all()

    @property
    def trouble(self) -> str:
        return "" if self.connected.is_set() else self._reason

    def server_of(self, stream: str) -> Server | None:
        return self._server

    def line(self, stream: str, name: str) -> Link:
        return Link(self._server, name=name, timeout=self._timeout, clock=self._clock)

    async def places(self) -> Sequence[int]:
        return (0,)

    async def at_place(self, place: int, commands: Sequence[Command]) -> list[Reply]:
        return await self.submit(commands, True)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        return self.submit([("MULTI",), *commands, ("EXEC",)], retry, until=until, atomic=True, now=True)

    def submit(
        self,
        commands: Sequence[Command],
        retry: bool,
        *,
        block: float = 0.0,
        until: float | None = None,
        now: bool = False,
        atomic: bool = False,
    ) -> asyncio.Future[list[Reply]]:
        """See Port. atomic: as one transaction, whose own replies are left out."""
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        if self._closing:
            future.set_exception(self._closed())
            return future
        data = packed(commands)
        self._queue.append(_Unit(data, len(commands), future, retry, block, until, atomic))
        self._queued += len(data)
        if now and (not self._inflight or (self._queued >= _WORTH and len(self._inflight) < _ABREAST)):
            self._flush()
        else:
            self._schedule()
        return future

    def _schedule(self) -> None:
        # While a flush is unanswered, what comes up waits for the next one: a busy link would spend most of its time on
        # system calls for a few commands each.
        if self._flush_scheduled:
            return
        if not self._inflight:
            self._flush_scheduled = True
            self._loop.call_soon(self._tick)
        elif self._late is None:
            self._late = self._loop.call_later(_LATE, self._hurry)

    def _tick(self) -> None:
        self._flush_scheduled = False
        if not self._inflight:
            self._flush()

    def _flush(self) -> None:
        if self._wire is not None and (units := self._taken()):
            self._send(self._wire, units)

    def _hurry(self) -> None:
        """The answer is late. If it got lost, the number behind the next flush shows it now, not at the time-out."""
        self._late = None
        if self._wire is not None and self._inflight:
            self._send(self._wire, self._taken())

    def _taken(self) -> list[_Unit]:
        """What the queue holds and somebody still waits for."""
        now = self._loop.time()
        # a caller that gave up before its command was sent must not find it carried out later
        units = []
        for unit in self._queue:
            if unit.future.done():
                continue
            if unit.until is not None and now > unit.until:
                unit.future.set_exception(ConnectionLost("there was no connection to Redis in time", unit.broken))
                continue
            units.append(unit)
        self._queue.clear()
        self._queued = 0
        return units

    def _send(self, wire: Wire, units: list[_Unit]) -> None:
        self._counter += 1
        marker = b"%d" % self._counter
        block, size = 0.0, 0
        for unit in units:
            size += len(unit.packed)
            if unit.block > block:
                block = unit.block
        data = [*[unit.packed for unit in units], b"*2\r\n$4\r\nECHO\r\n$%d\r\n%b\r\n" % (len(marker), marker)]
        patience = self._patience + block + size / _SLOWEST
        self._inflight.append(_Batch(units, marker, block, self._loop.time() + patience))
        wire.write(data)
        if units and not block and self._late is None:
            self._late = self._loop.call_later(_LATE, self._hurry)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        delay = 0.0
        while True:
            served, self._useful = self.generation, False
            slow = False
            try:
                await self._once()
            except Exception as exc:
                # whatever a server answers, this goes on
                slow = isinstance(exc, TimeoutError)
                self._report(str(exc) or f"no connection to Redis within {self._patience:g} s", served)
                if str(exc).startswith("BUSY "):
                    await self._end_script()
            self._requeue()
            # a server that takes connections and serves nothing is not asked faster than one that is away
            delay = _FIRST_BACKOFF if self._useful else min(_MAX_BACKOFF, delay * 2 or _FIRST_BACKOFF)
            most = max(MOST_PATIENCE, self._timeout)
            self._patience = min(most, self._patience * 2) if slow and not self._useful else self._timeout
            await asyncio.sleep(delay)

    async def _once(self) -> None:
        """One connection, from its beginning to its end. Raises what ended it; TimeoutError for no answer in time."""
        wire: Wire | None = None
        try:
            asked = time.monotonic()
            handshake = [("CLIENT", "ID"), *self.greeting, ("CLIENT", "SETNAME", self._name)]
            async with asyncio.timeout(self._patience):
                server = self._at = await self.server()
                wire, replies = await open_wire(server, [*handshake, ("TIME",)])
                told = replies.pop()
                self._check(replies)
                for reply in await load_scripts(wire.ask):
                    if isinstance(reply, ReplyError):
                        raise ConnectionError(_NO_SCRIPTS if reply.code == "NOPERM" else str(reply))
            if not isinstance(told, ReplyError):
                self._clock.learn(told, asked)
            await self._serve(wire, int(replies[0]))
        finally:
            self._wire = None
            self.connected.clear()
            if wire is not None:
                wire.abort()

    async def _end_script(self) -> None:
        """Ends the script that keeps everybody waiting, where this user may, and it has written nothing yet."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._timeout):
                # a busy server lets nobody choose a database
                wire, (told,) = await open_wire(replace(await self.server(), database=0), [("SCRIPT", "KILL")])
            wire.abort()
            if not isinstance(told, ReplyError):
                log.error("bus.script_ended", reason="it kept Redis from serving anybody for too long")
            elif str(told).startswith("UNKILLABLE"):
                log.error("bus.script_cannot_be_ended", reason=str(told))

    async def server(self) -> Server:
        """The server to connect to now."""
        return self._server

    def _check(self, replies: list[Reply]) -> None:
        """Looks at the replies of the handshake. Raises ConnectionError when this is the wrong server."""
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise ConnectionError(str(reply))

    def _report(self, reason: str, served: int) -> None:
        """Says once per outage, and once per new reason, that the connection is away."""
        if self.generation > served or reason != self._reason:
            log.warning("bus.connection_lost", link=self._name, reason=reason)
        self._reason = reason

    async def _serve(self, wire: Wire, client_id: int) -> None:
        """Receives replies until the connection breaks."""
        self.client_id = client_id
        wire.receive = self._receive
        self._wire = wire
        self.generation += 1
        self.connected.set()
        self._flush()
        watches: list[asyncio.Future[Any]] = [asyncio.create_task(watch) for watch in self._watches(wire)]
        try:
            await asyncio.wait([wire.lost, *watches], return_when=asyncio.FIRST_COMPLETED)
            for watch in watches:
                # one that failed can watch no more, and nothing goes on unwatched
                if watch.done():
                    watch.result()
            raise wire.lost.result()
        finally:
            for watch in watches:
                watch.cancel()

    def _watches(self, wire: Wire) -> list[Coroutine[Any, Any, NoReturn]]:
        """What goes on beside a connection; each raises why the connection has to end."""
        return [self._watch(wire)]

    async def _watch(self, wire: Wire) -> NoReturn:
        """Raises TimeoutError when a reply is overdue and nothing moves in either direction."""
        suspect: _Batch | None = None
        unsent, moved = 0, self._loop.time()
        while True:
            now = self._loop.time()
            # a long message on a slow line is no silence
            before, unsent = unsent, wire.transport.get_write_buffer_size()
            if unsent < before or wire.heard > moved:
                moved = now
            oldest = self._inflight[0] if self._inflight else None
            if oldest is not None and now > oldest.expires and now - moved > self._patience + oldest.block:
                if oldest is suspect:
                    raise TimeoutError(f"Redis has not answered for {self._patience:g} s")
                # after a pause of our own the answer may wait in the socket: it is read before the second look
                suspect = oldest
            else:
                suspect = None
            await asyncio.sleep(self._timeout / 10)

    def _receive(self, replies: list[Reply]) -> None:
        start = 0
        while start < len(replies):
            if not self._inflight:
                raise Desync("a reply that nobody asked for")
            batch = self._inflight[0]
            end = start + batch.expected - len(batch.replies)
            batch.replies += replies[start:end]
            start = end
            if len(batch.replies) == batch.expected:
                self._complete(batch)

    def _complete(self, batch: _Batch) -> None:
        """Hands the replies of a flush to whom they belong."""
        if batch.replies[-1] != batch.marker:
            raise Desync("replies do not match their commands")
        self._check_condition(batch.replies)
        if batch.atomic:
            for answer in batch.replies:
                # those of a transaction stand in a list
                if isinstance(answer, list):
                    self._check_condition(answer)
        self._inflight.popleft()
        self._useful = True
        start = 0
        for unit in batch.units:
            end = start + unit.count
            if not unit.future.done():
                unit.settle(batch.replies[start:end])
            start = end
        if not self._inflight and self._late is not None:
            self._late.cancel()
            self._late = None
        if self._queue:
            # behind the tasks that have just been woken: what they send joins
            self._schedule()

    def _check_condition(self, replies: Sequence[Reply]) -> None:
        """Raises ConnectionError when a reply speaks of the server's condition."""
        if ReplyError in map(type, replies):
            for reply in replies:
                if isinstance(reply, ReplyError) and reply.code in self.conditions:
                    raise ConnectionError(str(reply))

    def _requeue(self) -> None:
        """Unanswered units go back to the head of the queue, in their order; those not to be repeated fail."""
        again: list[_Unit] = []
        while self._inflight:
            for unit in self._inflight.popleft().units:
                if unit.future.done():
                    continue
                unit.tries += 1
                if not unit.retry:
                    unit.future.set_exception(ConnectionLost("the connection to Redis was lost", unit.broken))
                elif unit.broken >= MOST_TRIES:
                    text = f"a message of {len(unit.packed)} bytes broke the connection to Redis {unit.broken} times"
                    unit.future.set_exception(PermanentError(text))
                else:
                    again.append(unit)
        self._queue.extendleft(reversed(again))

    def _fail_all(self) -> None:
        self._requeue()
        for unit in self._queue:
            if not unit.future.done():
                unit.future.set_exception(self._closed())


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels a task until it has ended. Raises what it ended with, unless that is the cancellation.

    Once is not always enough: a library that is connecting may swallow it when its own time-out ends at that moment.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN)
    with contextlib.suppress(asyncio.CancelledError):
        task.result()
