"""Reading work streams as one consumer of a group: bounded prefetch, heartbeats, claims, dead letters, hand-over."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.bus.link import Command, ConnectionLost, ReplyError
from shared.bus.scripts import HAND_OVER, REAP, RENEW
from shared.bus.streams import Bus, Entry, entries, served_key
from shared.envelope import now_ms
from shared.errors import Fenced, PermanentError, TransientError
from shared.logging import get_logger

log = get_logger()

# Whatever a leaving replica still holds is given to this consumer, idle for so long that the next sweep claims it.
HEIR = "handover"
_BLOCK = 2.0
_REAP_IDLE_MS = 60_000
_MISSED = 3


@dataclass(eq=False, slots=True)
class Delivery:
    """An entry that this replica holds."""

    stream: str
    entry_id: str
    fields: list[bytes]
    deliveries: int
    _consumer: Consumer
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @contextlib.asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Gives the slot to other work while this entry waits for something (its heartbeat goes on)."""
        self._consumer.busy -= 1
        self._consumer.changed.set()
        try:
            yield
        finally:
            self._consumer.busy += 1


# A handler returns the commands that make its effects visible; they are written together with the acknowledgement.
Handler = Callable[[Delivery], Awaitable[Sequence[Command]]]
# Called when an entry is given up for good; returns commands to write with the dead letter.
Undertaker = Callable[[Delivery, str], Awaitable[Sequence[Command]]]


@dataclass(frozen=True, slots=True)
class Route:
    handler: Handler
    undertaker: Undertaker | None = None
    delete_finished: bool = False


class Consumer:
    """One replica's part of a consumer group over one or more work streams.

    Entries are acknowledged after their effects, in the same write. Their claim is renewed every `heartbeat` seconds;
    those idle for three heartbeats are taken over from whoever held them, at most `max_deliveries` times in all.
    """

    def __init__(
        self,
        bus: Bus,
        group: str,
        replica: str,
        routes: Mapping[str, Route],
        *,
        concurrency: int,
        heartbeat: float,
        max_deliveries: int,
        drain: float,
    ) -> None:
        self._bus = bus
        self._group = group
        self._replica = replica
        self._routes = dict(routes)
        self.concurrency = concurrency
        self._heartbeat = heartbeat
        self._max_deliveries = max_deliveries
        self._drain = drain
        self.held: dict[tuple[str, str], Delivery] = {}
        self.busy = 0
        self.handled = 0
        self.changed = asyncio.Event()
        self._stopping = False
        self._renewed = 0.0
        self._finished: deque[tuple[float, str, str]] = deque()

    async def run(self, stop: asyncio.Event) -> None:
        """Reads and handles until `stop` is set, then finishes or hands over what it holds."""
        await self._create_groups()
        self._renewed = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as background:
            self._tasks = background
            beating = background.create_task(self._beat_forever())
            reading = background.create_task(self._read_forever())
            await stop.wait()
            self._stopping = True
            self.changed.set()
            await self._unblock()
            await reading
            await self._leave()
            beating.cancel()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_forever(self) -> None:
        streams = list(self._routes)
        generation = 0
        while not self._stopping:
            room = self.concurrency - self.busy
            if room <= 0:
                self.changed.clear()
                await self.changed.wait()
                continue
            try:
                if generation != self._bus.reader.generation:
                    # what was read while the reply got lost is ours, but unseen
                    await self._bus.reader.connected.wait()
                    generation = self._bus.reader.generation
                    await self._recover()
                    continue
                reply = await self._bus.reader.call(
                    *("XREADGROUP", "GROUP", self._group, self._replica, "COUNT", max(1, room // len(streams))),
                    *("BLOCK", int(_BLOCK * 1000), "STREAMS", *streams, *(">" for _ in streams)),
                    retry=False,
                    block=_BLOCK,
                )
            except ConnectionLost:
                continue
            except ReplyError as exc:
                await self._repair(exc)
                continue
            for stream, items in reply or ():
                for entry in entries(items):
                    self._start(stream.decode(), entry, 1)

    async def _recover(self) -> None:
        """Takes up the entries that are pending for this consumer but that it does not hold."""
        for stream in self._routes:
            after = "0"
            while True:
                reply = await self._bus.reader.call(
                    *("XREADGROUP", "GROUP", self._group, self._replica, "COUNT", 200, "STREAMS", stream, after),
                    retry=False,
                )
                found = entries(reply[0][1]) if reply else []
                if not found:
                    break
                after = found[-1][0]
                for entry in found:
                    if entry[1] is None:
                        await self._bus.link.call("XACK", stream, self._group, entry[0])
                    else:
                        self._start(stream, entry, 1)

    def _start(self, stream: str, entry: Entry, deliveries: int) -> None:
        entry_id, fields = entry
        key = (stream, entry_id)
        if key in self.held or self._stopping:
            return
        delivery = Delivery(stream, entry_id, fields, deliveries, self)
        self.held[key] = delivery
        self.busy += 1
        delivery.task = self._tasks.create_task(self._handle(delivery))

    async def _repair(self, exc: ReplyError) -> None:
        if exc.code != "NOGROUP":
            log.error("bus.read_failed", error=str(exc))
            await asyncio.sleep(self._heartbeat)
        await self._create_groups()

    async def _create_groups(self) -> None:
        """From id 0: what was written before the group existed, or after a flush, is work too."""
        for reply in await self._bus.link.pipe_raw(
            [("XGROUP", "CREATE", stream, self._group, "0", "MKSTREAM") for stream in self._routes]
        ):
            if isinstance(reply, ReplyError) and reply.code != "BUSYGROUP":
                log.error("bus.group_failed", error=str(reply))

    # ── handling ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _handle(self, delivery: Delivery) -> None:
        """The one place where every failure ends: the entry is tried again, set aside, or left to its new owner."""
        try:
            await self._process(delivery)
        except Fenced:
            log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
        except TransientError as exc:
            log.warning("bus.try_again", entry_id=delivery.entry_id, reason=str(exc), attempt=delivery.deliveries)
        except Exception:
            # a bug in a handler must not stop the participant
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        finally:
            del self.held[delivery.stream, delivery.entry_id]
            self.busy -= 1
            self.changed.set()

    async def _process(self, delivery: Delivery) -> None:
        try:
            if delivery.deliveries > self._max_deliveries:
                raise PermanentError(f"gave up after {delivery.deliveries - 1} deliveries")
            effects = await self._routes[delivery.stream].handler(delivery)
        except PermanentError as exc:
            effects = await self._burial(delivery, str(exc))
        await self.check_claim(delivery)
        await self._finish(delivery, effects)

    async def _finish(self, delivery: Delivery, effects: Sequence[Command]) -> None:
        # acknowledge last: a crash in between repeats the effects, which are idempotent, and loses nothing
        await self._bus.link.pipe([*effects, ("XACK", delivery.stream, self._group, delivery.entry_id)])
        self.handled += 1
        if self._routes[delivery.stream].delete_finished:
            self._finished.append((asyncio.get_running_loop().time(), delivery.stream, delivery.entry_id))

    async def _burial(self, delivery: Delivery, reason: str) -> list[Command]:
        """What sets an entry aside, after whoever waits for it has been told."""
        log.error("bus.dead_letter", stream=delivery.stream, entry_id=delivery.entry_id, reason=reason)
        undertaker = self._routes[delivery.stream].undertaker
        effects: Sequence[Command] = ()
        if undertaker is not None:
            try:
                effects = await undertaker(delivery, reason)
            except PermanentError as exc:
                log.info("bus.nobody_told", reason=str(exc))
        letter = self._bus.burying(
            delivery.stream, self._group, delivery.entry_id, delivery.fields, delivery.deliveries, reason
        )
        return [*effects, letter]

    async def check_claim(self, delivery: Delivery) -> None:
        """After a pause long enough to lose claims, makes sure before a write. Raises Fenced."""
        silent = asyncio.get_running_loop().time() - self._renewed
        if silent > 2 * self._heartbeat and await self._renew(delivery.stream, [delivery.entry_id]):
            raise Fenced(f"{delivery.entry_id} was taken over")

    # ── heartbeat ────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                await self._beat()
            except (TransientError, ReplyError) as exc:
                log.warning("bus.heartbeat_failed", reason=str(exc))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        by_stream: dict[str, list[str]] = {}
        for stream, entry_id in self.held:
            by_stream.setdefault(stream, []).append(entry_id)
        for stream, ids in by_stream.items():
            for lost in await self._renew(stream, ids):
                delivery = self.held.get((stream, lost))
                if delivery is not None and delivery.task is not None:
                    log.warning("bus.claim_lost", stream=stream, entry_id=lost)
                    delivery.task.cancel()
        self._renewed = started
        await self._delete_finished(started - self._heartbeat)
        await self._bus.link.pipe([("HSET", served_key(stream), self._group, now_ms()) for stream in self._routes])
        if not self._stopping:
            await self._sweep()

    async def _renew(self, stream: str, ids: Sequence[str]) -> list[str]:
        (reply,) = await self._bus.link.pipe_raw([RENEW((stream,), self._group, self._replica, *ids)])
        if isinstance(reply, ReplyError):
            if reply.code in ("NOGROUP", "ERR"):  # a script wraps the group's absence in its own error
                await self._create_groups()
                return list(ids)
            raise reply
        return [entry_id.decode() for entry_id in reply]

    async def _sweep(self) -> None:
        """Claims what nobody has kept alive, as far as there is room; on a timer, so that idle queues recover too."""
        idle = int(self._heartbeat * _MISSED * 1000)
        for stream in self._routes:
            room = self.concurrency - self.busy
            if room <= 0:
                return
            rows, _ = await self._bus.link.pipe_raw(
                [
                    ("XPENDING", stream, self._group, "IDLE", idle, "-", "+", room),
                    REAP((stream,), self._group, _REAP_IDLE_MS),
                ]
            )
            if isinstance(rows, ReplyError):
                await self._repair(rows)
                continue
            for entry_id, _owner, _idle, deliveries in rows:
                if (stream, entry_id.decode()) in self.held:
                    continue
                claimed = await self._bus.link.call("XCLAIM", stream, self._group, self._replica, idle, entry_id)
                for entry in entries(claimed):
                    log.info("bus.claimed", stream=stream, entry_id=entry[0], deliveries=deliveries + 1)
                    self._start(stream, entry, deliveries + 1)

    async def _delete_finished(self, before: float) -> None:
        """A heartbeat late, so that observers that tail the stream have seen the entries."""
        ids: dict[str, list[str]] = {}
        while self._finished and self._finished[0][0] <= before:
            _, stream, entry_id = self._finished.popleft()
            ids.setdefault(stream, []).append(entry_id)
        for stream, gone in ids.items():
            await self._bus.link.call("XDEL", stream, *gone)

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _unblock(self) -> None:
        with contextlib.suppress(TransientError, ReplyError):
            await self._bus.link.call("CLIENT", "UNBLOCK", self._bus.reader.client_id)

    async def _leave(self) -> None:
        """Finishes within `drain` seconds, makes the rest claimable at once, leaves no consumer behind."""
        tasks = [delivery.task for delivery in self.held.values() if delivery.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._drain)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        try:
            async with asyncio.timeout(_BLOCK):
                await self._delete_finished(asyncio.get_running_loop().time())
                await self._bus.link.pipe_raw(
                    [HAND_OVER((stream,), self._group, self._replica, HEIR) for stream in self._routes]
                )
        except (TimeoutError, TransientError) as exc:
            # the claims time out by themselves
            log.warning("bus.hand_over_failed", reason=str(exc))
