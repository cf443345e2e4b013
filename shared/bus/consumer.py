"""Reading work streams as one consumer of a group: bounded prefetch, heartbeats, claims, dead letters, hand-over."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.bus.link import Command, ConnectionLost, OutOfMemory, ReplyError
from shared.bus.scripts import HAND_OVER, REAP, REMOVE_FINISHED, RENEW
from shared.bus.streams import Bus, Entry, entries, served_key
from shared.envelope import now_ms
from shared.errors import Fenced, Local2Error, PermanentError, TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

# Whatever a leaving replica still holds is given to this consumer, idle for so long that the next sweep claims it.
HEIR = "handover"
_HAND_OVER_SECONDS = 2.0
# A read of fewer streams than there are must not keep the others waiting.
_GLANCE = 0.05
_REAP_IDLE_MS = 60_000
_MISSED = 3


@dataclass(eq=False, slots=True)
class Delivery:
    """An entry that this replica holds; `lost` when somebody else has taken it over, `refused` when Redis has refused
    its effects before."""

    stream: str
    entry_id: str
    fields: list[bytes]
    deliveries: int
    _consumer: Consumer
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    lost: bool = False
    refused: bool = False

    @contextlib.asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Gives the slot to other work while this entry waits for something (its heartbeat goes on)."""
        self._consumer.vacate(self)
        try:
            yield
            await self._consumer.slot()
        finally:
            self._consumer.occupy(self)


# A handler returns the commands that make its effects visible; they are written together with the acknowledgement.
Handler = Callable[[Delivery], Awaitable[Sequence[Command]]]
# Called when an entry is given up for good; returns commands to write with the dead letter.
Undertaker = Callable[[Delivery, str], Awaitable[Sequence[Command]]]


@dataclass(frozen=True, slots=True)
class Route:
    """limit: entries of this stream held at the same time, parked ones included; None: as many as there are slots.
    What waits for something else must leave room for the other streams of its replica.
    """

    handler: Handler
    undertaker: Undertaker | None = None
    delete_finished: bool = False
    limit: int | None = None


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
        self._held_of = dict.fromkeys(self._routes, 0)
        self.busy = 0
        self.handled = 0
        self.changed = asyncio.Event()
        # slots promised to the read in progress, and wanted back by work that was parked
        self._reading = 0
        self._returning = 0
        self._suspects = 0
        self._turn = deque(self._routes)
        self._claimable = False
        self._stopping = False
        self._renewed = 0.0
        self._finished: deque[tuple[float, str, str]] = deque()

    async def run(self, stop: asyncio.Event) -> None:
        """Reads and handles until `stop` is set, then finishes or hands over what it holds."""
        self._renewed = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as background:
            self._tasks = background
            beating = background.create_task(self._beat_forever())
            reading = background.create_task(self._read_forever())
            await stop.wait()
            self._stopping = True
            self.changed.set()
            unblocking = background.create_task(self._unblock())
            # a read ends by itself, unless Redis is away
            await asyncio.wait({reading}, timeout=self._bus.block + 0.5)
            reading.cancel()
            unblocking.cancel()
            await self._leave()
            beating.cancel()

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────

    def occupy(self, delivery: Delivery) -> None:
        self.busy += 1
        self._suspects += self._last_chance(delivery.deliveries)

    def vacate(self, delivery: Delivery) -> None:
        self.busy -= 1
        self._suspects -= self._last_chance(delivery.deliveries)
        self.changed.set()

    def _last_chance(self, deliveries: int) -> bool:
        """What has failed all times but one is tried alone: if it kills the process, its neighbours survive it."""
        return deliveries == self._max_deliveries > 1

    def _room(self) -> int:
        return 0 if self._suspects else self.concurrency - self.busy - self._returning

    def _room_of(self, stream: str) -> int | None:
        """How many more entries of a stream may be held; None when it has no limit of its own."""
        limit = self._routes[stream].limit
        return None if limit is None else max(0, limit - self._held_of[stream])

    async def _wait_for_room(self) -> int:
        """The free slots, at least one unless the replica is stopping."""
        while (room := self._room()) <= 0 and not self._stopping:
            self.changed.clear()
            await self.changed.wait()
        return room

    async def slot(self) -> None:
        """Waits until a slot is free for work that goes on; it comes before new entries."""
        self._returning += 1
        try:
            while self.busy + self._reading >= self.concurrency:
                if self._reading:
                    # the slot is promised to a read that may wait for long
                    if not await self._unblock():
                        await asyncio.sleep(0.01)
                    continue
                self.changed.clear()
                await self.changed.wait()
        finally:
            self._returning -= 1

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_forever(self) -> None:
        await self._create_groups()
        generation = 0
        while not self._stopping:
            room = await self._wait_for_room()
            try:
                if generation != self._bus.reader.generation or not self._bus.reader.connected.is_set():
                    # what was read while the reply got lost is ours, but unseen
                    await self._bus.reader.connected.wait()
                    generation = self._bus.reader.generation
                    await self._recover()
                elif self._claimable:
                    await self._sweep()
                elif not self._stopping:
                    await self._read(room)
            except ConnectionLost:
                continue
            except (TransientError, ReplyError) as exc:
                await self._repair(exc)

    async def _read(self, room: int) -> None:
        """New entries, at most as many as there is room for."""
        limits = {stream: self._room_of(stream) for stream in self._turn}
        streams = [stream for stream, limit in limits.items() if limit != 0][:room]
        if len(streams) < len(self._turn):
            self._turn.rotate(-room)
        if not streams:
            await asyncio.sleep(_GLANCE)
            return
        block = self._bus.block if len(streams) == len(self._turn) else _GLANCE
        # Redis knows one count for all streams of a read
        count = min([room // len(streams), *(limit for stream in streams if (limit := limits[stream]) is not None)])
        self._reading = count * len(streams)
        try:
            reply = await self._bus.reader.call(
                *("XREADGROUP", "GROUP", self._group, self._replica, "COUNT", count),
                *("BLOCK", int(block * 1000), "STREAMS", *streams, *(">" for _ in streams)),
                retry=False,
                block=block,
            )
        finally:
            self._reading = 0
            self.changed.set()
        for stream, items in reply or ():
            for entry in entries(items):
                self._start(stream.decode(), entry, 1)

    async def _recover(self) -> None:
        """Takes up the entries that are pending for this consumer but that it does not hold."""
        for stream in self._routes:
            after = "-"
            while not self._stopping:
                room = await self._wait_for_room()
                # on the connection of the acknowledgements: behind them, what has just been finished is not seen
                rows = await self._bus.link.call("XPENDING", stream, self._group, after, "+", room, self._replica)
                if not rows:
                    break
                after = f"({rows[-1][0].decode()}"
                for entry_id, _owner, _idle, deliveries in rows:
                    if (stream, entry_id.decode()) not in self.held:
                        await self._claim(stream, entry_id, deliveries, 0, "RETRYCOUNT", deliveries)

    async def _claim(self, stream: str, entry_id: bytes, deliveries: int, idle: int, *options: str | int) -> int:
        """Takes one entry over, unless somebody has acknowledged or renewed it meanwhile."""
        claimed = entries(
            await self._bus.link.call("XCLAIM", stream, self._group, self._replica, idle, entry_id, *options)
        )
        for entry in claimed:
            self._start(stream, entry, deliveries)
        return len(claimed)

    def _start(self, stream: str, entry: Entry, deliveries: int) -> None:
        entry_id, fields = entry
        key = (stream, entry_id)
        if key in self.held or self._stopping:
            return
        delivery = Delivery(stream, entry_id, fields, deliveries, self)
        self.held[key] = delivery
        self._held_of[stream] += 1
        self.occupy(delivery)
        delivery.task = self._tasks.create_task(self._handle(delivery))

    async def _repair(self, exc: TransientError | ReplyError) -> None:
        if not isinstance(exc, ReplyError) or exc.code != "NOGROUP":
            log.error("bus.read_failed", error=str(exc))
            await asyncio.sleep(self._heartbeat)
        await self._create_groups()

    async def _create_groups(self) -> None:
        """From id 0: what was written before the group existed, or after a flush, is work too."""
        streams = list(self._routes)
        creating: list[Command] = [("XGROUP", "CREATE", name, self._group, "0", "MKSTREAM") for name in streams]
        for reply in await self._bus.link.pipe_raw([*creating, *self._serving()]):
            if isinstance(reply, ReplyError) and reply.code != "BUSYGROUP":
                log.error("bus.group_failed", error=str(reply))

    def _serving(self) -> list[Command]:
        return [("HSET", served_key(stream), self._group, now_ms()) for stream in self._routes]

    # ── handling ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _handle(self, delivery: Delivery) -> None:
        """The one place where every failure ends: the entry is tried again, set aside, or left to its new owner."""
        try:
            try:
                await self._carry_out(delivery)
            except PermanentError as exc:
                await self._bury(delivery, str(exc))
        except Fenced:
            log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
        except TransientError as exc:
            log.warning("bus.try_again", entry_id=delivery.entry_id, reason=str(exc), attempt=delivery.deliveries)
        except Exception:
            # a bug in a handler must not stop the participant
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        finally:
            del self.held[delivery.stream, delivery.entry_id]
            self._held_of[delivery.stream] -= 1
            self.vacate(delivery)

    async def _carry_out(self, delivery: Delivery) -> None:
        """Handles an entry and acknowledges it. While Redis is full the entry waits here and is handled again: that is
        not the entry's fault, and must not use up its deliveries."""
        while True:
            try:
                await self._finish(delivery, await self._attempt(delivery))
                return
            except OutOfMemory as exc:
                log.warning("bus.full", stream=delivery.stream, entry_id=delivery.entry_id, reason=str(exc))
            await asyncio.sleep(self._heartbeat)
            await self.check_claim(delivery)

    async def _attempt(self, delivery: Delivery) -> Sequence[Command]:
        """The effects of an entry. Raises PermanentError when it was tried often enough."""
        if delivery.deliveries > self._max_deliveries:
            raise PermanentError(f"gave up after {delivery.deliveries - 1} deliveries")
        try:
            return await self._routes[delivery.stream].handler(delivery)
        except Local2Error:
            raise
        except Exception as exc:
            if delivery.deliveries < self._max_deliveries:
                raise
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
            raise PermanentError(
                f"gave up after {delivery.deliveries} deliveries: {type(exc).__name__}: {exc}"
            ) from exc

    async def _finish(self, delivery: Delivery, effects: Sequence[Command]) -> None:
        """Writes the effects and acknowledges. Raises Fenced when the entry was taken over meanwhile."""
        # acknowledge last: a crash in between repeats the effects, which are idempotent, and loses nothing
        ack = ("XACK", delivery.stream, self._group, delivery.entry_id)
        # together at first; what was refused before is acknowledged only once its effects are known to be written
        apart = (delivery.deliveries > 1 or delivery.refused) and effects
        while True:
            try:
                # a write that waits for a connection until the claim may be lost must not be sent any more
                if apart:
                    await self._bus.link.pipe(effects, until=await self.check_claim(delivery))
                    await self._bus.link.pipe([ack], until=await self.check_claim(delivery))
                else:
                    await self._bus.link.pipe([*effects, ack], until=await self.check_claim(delivery))
                break
            except ConnectionLost:
                continue
            except (ReplyError, OutOfMemory):
                delivery.refused = True
                if not apart:
                    await self._take_back(delivery)
                raise
        self.handled += 1
        if self._routes[delivery.stream].delete_finished:
            self._finished.append((asyncio.get_running_loop().time(), delivery.stream, delivery.entry_id))

    async def _take_back(self, delivery: Delivery) -> None:
        """Makes an entry pending again whose effects Redis refused: the acknowledgement behind them went through."""
        claim = ("XCLAIM", delivery.stream, self._group, self._replica, 0, delivery.entry_id)
        await self._bus.link.pipe_raw([(*claim, "RETRYCOUNT", delivery.deliveries, "FORCE", "JUSTID")])

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        """Sets an entry aside, and tells whoever waits for it."""
        log.error("bus.dead_letter", stream=delivery.stream, entry_id=delivery.entry_id, reason=reason)
        undertaker = self._routes[delivery.stream].undertaker
        effects: Sequence[Command] = ()
        if undertaker is not None:
            try:
                effects = await undertaker(delivery, reason)
            except PermanentError as exc:
                log.info("bus.nobody_told", reason=str(exc))
            except (Fenced, TransientError):
                raise
            except Exception:
                log.exception("bus.undertaker_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        letter = self._bus.burying(
            delivery.stream, self._group, delivery.entry_id, delivery.fields, delivery.deliveries, reason
        )
        try:
            await self._finish(delivery, [*effects, letter])
        except ReplyError as exc:
            if not effects:
                raise
            # what cannot be written for it must not keep a bad entry from being set aside
            log.error("bus.undertaker_refused", entry_id=delivery.entry_id, error=str(exc))
            await self._finish(delivery, [letter])

    async def check_claim(self, delivery: Delivery) -> float:
        """The loop's time until which the entry is certainly ours; asks Redis after a long pause. Raises Fenced."""
        if delivery.lost:
            raise Fenced(f"{delivery.entry_id} was taken over")
        renewed = self._renewed
        now = asyncio.get_running_loop().time()
        if now - renewed > 2 * self._heartbeat:
            renewed = now
            if await self._renew(delivery.stream, [delivery.entry_id]):
                raise Fenced(f"{delivery.entry_id} was taken over")
        return renewed + 2 * self._heartbeat

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
                    # a handler may swallow the cancellation
                    delivery.lost = True
                    delivery.task.cancel()
        self._renewed = started
        await self._delete_finished(started - self._heartbeat)
        if not self._stopping:
            await self._look()
        await self._bus.link.pipe(self._serving())

    async def _renew(self, stream: str, ids: Sequence[str]) -> list[str]:
        (reply,) = await self._bus.link.pipe_raw([RENEW((stream,), self._group, self._replica, *ids)])
        if isinstance(reply, ReplyError):
            if reply.code in ("NOGROUP", "ERR"):  # a script wraps the group's absence in its own error
                await self._create_groups()
                return list(ids)
            raise reply
        return [entry_id.decode() for entry_id in reply]

    def _idle(self) -> int:
        """Milliseconds without a sign of life after which an entry is anybody's."""
        return int(self._heartbeat * _MISSED * 1000)

    async def _look(self) -> None:
        """Is there anything that nobody keeps alive? On a timer, so that idle queues recover too."""
        for stream in self._routes:
            rows, _ = await self._bus.link.pipe_raw(
                [
                    ("XPENDING", stream, self._group, "IDLE", self._idle(), "-", "+", 1),
                    REAP((stream,), self._group, _REAP_IDLE_MS),
                ]
            )
            if isinstance(rows, ReplyError):
                await self._repair(rows)
            elif rows:
                self._claimable = True
        if self._claimable and self._reading:
            # the reader claims, because it alone knows how many slots are free
            await self._unblock()

    async def _sweep(self) -> None:
        """Claims what nobody has kept alive, as far as there is room."""
        self._claimable = False
        for stream in self._routes:
            room = self._room()
            if room <= 0:
                self._claimable = True
                return
            if (limit := self._room_of(stream)) is not None:
                # a full stream's entries are looked for again with the next heartbeat
                room = min(room, limit)
                if not room:
                    continue
            rows = await self._bus.link.call("XPENDING", stream, self._group, "IDLE", self._idle(), "-", "+", room)
            for entry_id, _owner, _idle, deliveries in rows:
                if (stream, entry_id.decode()) in self.held:
                    continue
                if self._suspects and deliveries < self._max_deliveries:
                    self._claimable = True
                    continue
                if await self._claim(stream, entry_id, deliveries + 1, self._idle()):
                    log.info("bus.claimed", stream=stream, entry_id=entry_id.decode(), deliveries=deliveries + 1)
                    self._claimable = self._claimable or len(rows) == room

    async def _delete_finished(self, before: float) -> None:
        """A heartbeat late, so that observers that tail the stream have seen the entries."""
        ids: dict[str, list[str]] = {}
        while self._finished and self._finished[0][0] <= before:
            _, stream, entry_id = self._finished.popleft()
            ids.setdefault(stream, []).append(entry_id)
        for stream, gone in ids.items():
            await self._bus.link.call(*REMOVE_FINISHED((stream,), self._group, *gone))

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _unblock(self) -> bool:
        """Ends the read in progress; False when it does not wait in Redis."""
        with contextlib.suppress(TransientError, ReplyError):
            return await self._bus.unblock()
        return False

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
            async with asyncio.timeout(_HAND_OVER_SECONDS):
                await self._delete_finished(asyncio.get_running_loop().time())
                await self._bus.link.pipe_raw(
                    [HAND_OVER((stream,), self._group, self._replica, HEIR) for stream in self._routes]
                )
        except (TimeoutError, TransientError) as exc:
            # the claims time out by themselves
            log.warning("bus.hand_over_failed", reason=str(exc))
