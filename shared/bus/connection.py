"""A connection to Redis that many tasks share.

Commands of one loop tick leave in one write, and replies are matched by their order. Every batch ends with an ECHO of a
fresh number: a reply that got lost on the way would shift all later ones to the wrong command. The number shows that,
the connection is replaced, and unanswered commands are sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shared.bus.reconnecting import Reconnecting, until_first_ends
from shared.bus.redis_connection import BusConnection, pack
from shared.bus.replies import Command, ConnectionLost, Reply, ReplyError, checked, committed
from shared.errors import Local2Error, PermanentError

# Errors that describe the state of the server, not the command: another try on a new connection helps.
_CONDITIONS = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "NOSCRIPT", "UNBLOCKED", "BUSY")
)
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
        """How often the connection broke during this request; 0 for a small one."""
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


class Connection(Reconnecting):
    """A connection whose commands come from many tasks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._queue: deque[_Request] = deque()
        self._inflight: deque[_Batch] = deque()
        # set when there is something to write
        self._writable = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None
        self._marker = 0

    def dedicated(self, name: str) -> Connection:
        """Return a further connection to the same server, for a read that blocks; `async with` opens it."""
        return Connection(self.server, name=name, timeout=self.timeout, clock=self.clock)

    async def serve(self, connection: BusConnection) -> NoReturn:
        self._writable.set()
        await until_first_ends(
            self._write(connection), connection.receive(self._on_reply), self._watch_progress(connection)
        )

    def on_disconnect(self) -> None:
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

    def on_end(self) -> None:
        self.on_disconnect()
        for request in self._queue:
            if not request.future.done() and (error := self.closed) is not None:
                request.future.set_exception(error)
        self._queue.clear()

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, commands: Sequence[Command], retry: bool, *, block: float = 0.0, until: float | None = None,
        atomic: bool = False,
    ) -> asyncio.Future[list[Reply]]:  # fmt: skip
        """Return a future of the replies; error replies (ReplyError) are values.

        A future that is cancelled before its commands are sent keeps them from being sent.
        retry: send the commands again when the connection breaks; else the future raises ConnectionLost then, and the
        commands may have been carried out.
        block: seconds that the server may delay the replies (the command's BLOCK).
        until: the loop's time after which the commands are not sent (again); ConnectionLost is raised then.
        atomic: as one transaction, without the replies of MULTI and EXEC.
        """
        future: asyncio.Future[list[Reply]] = self.loop.create_future()
        if (error := self.closed) is not None:
            future.set_exception(error)
            return future
        if atomic:
            commands = [("MULTI",), *commands, ("EXEC",)]
        self._queue.append(_Request(pack(*commands), len(commands), future, retry, block, until, atomic))
        self._schedule()
        return future

    async def call(self, *command: Any, retry: bool = True, block: float = 0.0) -> Reply:
        """Return one command's reply (see `submit`). Raises ReplyError, BusFull, BusUnavailable, ConnectionLost."""
        (reply,) = await self.submit((command,), retry, block=block)
        return checked(reply)

    async def pipe(self, commands: Sequence[Command]) -> list[Reply]:
        """Return the replies of several commands, after all were carried out. Raise the first error among them."""
        return [checked(reply) for reply in await self.submit(commands, True)]

    async def pipe_raw(self, commands: Sequence[Command]) -> list[Reply]:
        """Like `pipe`; errors (ReplyError) are values."""
        return await self.submit(commands, True)

    def commit(
        self, commands: Sequence[Command], *, until: float | None = None, retry: bool = True
    ) -> asyncio.Future[list[Reply]]:
        """Send several writes as one transaction: all of them or none (see `submit`).

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
            self._late = self.loop.call_later(_FLUSH_DELAY_S, self._on_late)

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
            self._marker += 1
            marker = b"%d" % self._marker
            block = max([request.block for request in requests], default=0.0)
            limit = self.patience + block + sum([request.size for request in requests]) / _SLOWEST_BYTES_PER_S
            expected = sum([request.count for request in requests]) + 1
            self._inflight.append(_Batch(requests, marker, block, self.loop.time() + limit, expected))
            if requests and not block and self._late is None:
                self._late = self.loop.call_later(_FLUSH_DELAY_S, self._on_late)
            packed = [request.packed for request in requests]
            await connection.write(*packed, pack(("ECHO", marker)))

    def _take(self) -> list[_Request]:
        """Empty the queue; return its requests that a caller still awaits."""
        now = self.loop.time()
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

    def _on_reply(self, reply: Reply) -> None:
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
        self.useful = True
        if not self._inflight and self._late is not None:
            self._late.cancel()
            self._late = None
        if self._queue:
            self._schedule()

    async def _watch_progress(self, connection: BusConnection) -> NoReturn:
        """Raise TimeoutError when a reply is overdue and no bytes move in either direction."""
        suspect: _Batch | None = None
        unsent, moved = 0, self.loop.time()
        while True:
            now = self.loop.time()
            # A long message on a slow line moves bytes.
            before, unsent = unsent, connection.unsent_bytes
            if unsent < before or connection.received_at > moved:
                moved = now
            oldest = self._inflight[0] if self._inflight else None
            if oldest is not None and now > oldest.expires and now - moved > self.patience + oldest.block:
                if oldest is suspect:
                    raise TimeoutError(f"Redis has not answered for {self.patience:g} s")
                # After a pause of this process the answer may wait in the socket: it is read before the second check.
                suspect = oldest
            else:
                suspect = None
            await asyncio.sleep(self.timeout / 10)
