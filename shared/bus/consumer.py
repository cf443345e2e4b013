"""Reading work streams as one consumer of a group.

A consumer reads no more than it has room for (slots.py), keeps what it holds and takes over what nobody keeps
(claims.py), lets a handler work on each entry, and writes what the handler returns together with the entry's
acknowledgement (settling.py). An entry that cannot be handled is set aside as a dead letter.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus.claims import Claims, Found
from shared.bus.letters import burying
from shared.bus.link import MOST_TRIES
from shared.bus.port import BusFull, Command, ConnectionLost, ReplyError
from shared.bus.settling import EffectRefused, Settling
from shared.bus.slots import Delivery, Limit, Slots
from shared.bus.streams import Bus
from shared.errors import Fenced, Local2Error, PermanentError, TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

_HAND_OVER_SECONDS = 2.0
# A stream that holds as much as it may is left out of a read, which must not keep it waiting when it holds less again.
_GLANCE = 0.05
# A handler that waits for nothing is done before its task would have begun; Python 3.11 cannot do that.
_EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}

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
    limit: Limit = None


class Consumer:
    """One replica's part of a consumer group over one or more work streams.

    Entries are acknowledged with their effects, in one transaction. Their claim is renewed every `heartbeat` seconds;
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
        self._heartbeat = heartbeat
        self._max_deliveries = max_deliveries
        self._drain = drain
        self.slots = Slots(concurrency, _limits(routes), max_deliveries, self._unblock, self._count)
        self._claims = Claims(bus, group, replica, list(routes), heartbeat)
        self._settling = Settling(bus, group, self._settled)
        self.handled = 0
        self._turn = deque(self._routes)
        self._stopping = False

    @property
    def held(self) -> Mapping[tuple[str, str], Delivery]:
        return self.slots.held

    @property
    def concurrency(self) -> int:
        return self.slots.size

    def resize(self, concurrency: int) -> None:
        """Changes the number of entries that are worked on at the same time."""
        self.slots.size = concurrency
        self.slots.changed.set()

    async def add(self, routes: Mapping[str, Route]) -> None:
        """Reads more streams from now on, as long as it runs: what still waits in one must find its reader."""
        self._routes.update(routes)
        self.slots.limits.update(_limits(routes))
        self._claims.add(list(routes))
        with contextlib.suppress(TransientError, ReplyError):
            # a group that is missing is made by the read that does not find it
            await self._claims.begin()
        self._turn.extend(routes)
        self.slots.changed.set()
        if self.slots.promised:
            await self._unblock()

    async def run(self, stop: asyncio.Event) -> None:
        """Reads and handles until `stop` is set, then finishes or hands over what it holds."""
        # kept, because asking for the running loop is a system call before Python 3.12
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as background:
            beginning = background.create_task(self._begin())
            stopped = background.create_task(stop.wait())
            await asyncio.wait({beginning, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                # while Redis is away nobody could say that the groups are made
                beginning.cancel()
                return
            beating = background.create_task(self._beat_forever())
            reading = background.create_task(self._read_forever())
            await stopped
            self._stopping = True
            self.slots.changed.set()
            unblocking = background.create_task(self._unblock())
            # a read ends by itself, unless Redis is away
            await asyncio.wait({reading}, timeout=self._bus.block + 0.5)
            reading.cancel()
            unblocking.cancel()
            await self._leave()
            beating.cancel()

    async def _begin(self) -> None:
        """Makes the groups; a Redis that is away or full just now is waited for."""
        while True:
            try:
                return await self._claims.begin()
            except (TransientError, ReplyError) as exc:
                log.warning("bus.group_failed", reason=str(exc))
            await asyncio.sleep(self._heartbeat)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_forever(self) -> None:
        generation, reader = 0, self._bus.reader
        while not self._stopping:
            try:
                if generation != reader.generation or not reader.connected.is_set():
                    await reader.connected.wait()
                    generation = reader.generation
                    await self._recover()
                elif self._claims.orphaned:
                    await self._adopt()
                room = await self._room()
                if not self._stopping and not self._claims.orphaned and generation == reader.generation:
                    await self._read(room)
            except ConnectionLost:
                continue
            except (TransientError, ReplyError) as exc:
                await self._repair(exc)

    async def _room(self) -> int:
        while ((room := self.slots.room()) <= 0 or not self._turn) and not self._stopping:
            self.slots.changed.clear()
            await self.slots.changed.wait()
        return room

    async def _read(self, room: int) -> None:
        """New entries, at most as many as there is room for."""
        limits = {stream: self.slots.room_of(stream) for stream in self._turn if stream not in self._claims.broken}
        streams = [stream for stream, limit in limits.items() if limit != 0]
        if not streams:
            await asyncio.sleep(_GLANCE)
            return
        # To wait for some of the streams only would keep the others waiting. With fewer slots than streams, what is
        # there is taken in turn; where there is nothing, the next entry of any is waited for.
        for start in range(0, len(streams), room) if room < len(streams) else ():
            self._turn.rotate(-room)
            if await self._take(streams[start : start + room], 1, None):
                return
        block = self._bus.block if len(streams) == len(limits) else _GLANCE
        # Redis knows one count for all streams of a read
        share = max(1, room // len(streams))
        count = min([share, *filter(None, limits.values())])
        await self._take(streams, count, block)

    async def _take(self, streams: Sequence[str], count: int, block: float | None) -> bool:
        """Begins with at most so many new entries of each stream. block: seconds to wait for the first; None: not at
        all. Whether there were any."""
        waiting = () if block is None else ("BLOCK", int(block * 1000))
        # what comes beyond that waits for a slot; promised, whoever was parked would wait for a read that asks again
        self.slots.promised = max(0, min(count * len(streams), self.slots.room()))
        try:
            reply = await self._bus.reader.call(
                *("XREADGROUP", "GROUP", self._group, self._replica, "COUNT", count, *waiting),
                *("STREAMS", *streams, *[">"] * len(streams)),
                retry=False,
                block=block or 0.0,
                now=True,
            )
        finally:
            self.slots.promised = 0
            self.slots.changed.set()
        taken = self._hold(
            [
                Found(name.decode(), (entry_id.decode(), raw), 1)
                for name, items in reply or ()
                for entry_id, raw in items
            ]
        )
        if len(taken) > 1:
            # the next read is under way while these are worked on
            self._loop.call_soon(self._work_on, taken)
        else:
            # of one by itself the work comes first
            self._work_on(taken)
            await asyncio.sleep(0)
        return bool(reply)

    async def _recover(self) -> None:
        """Takes up what was read while the reply got lost: it is ours, but unseen."""
        for stream in self._routes.keys() - self._claims.broken:
            after: str | None = "-"
            while after is not None and not self._stopping:
                found, after = await self._claims.unseen(stream, after, await self._room() or 1, self.slots)
                self._work_on(self._hold(found))

    async def _adopt(self) -> None:
        """Takes over what nobody keeps, as far as there is room; the rest is found again with the next heartbeat."""
        orphaned, self._claims.orphaned = self._claims.orphaned, {}
        for stream, watched in orphaned.items():
            limit, room = self.slots.room_of(stream), self.slots.room()
            # what is to be given up needs no room
            count = 1 if self.slots.last_chance else room if limit is None else min(limit, room)
            if count <= 0:
                continue
            found = await self._claims.orphans(stream, watched, count, self.slots)
            for one in found:
                log.info("bus.claimed", stream=stream, entry_id=one.entry[0], deliveries=one.deliveries)
            self._work_on(self._hold(found))

    def _hold(self, found: Sequence[Found]) -> list[Delivery]:
        """Those of them that are to be worked on: nothing at the end, and nothing that is held already."""
        if self._stopping:
            return []
        deliveries = [Delivery(one.stream, *one.entry, one.deliveries, self.slots) for one in found]
        return [delivery for delivery in deliveries if self.slots.take(delivery)]

    def _work_on(self, taken: Sequence[Delivery]) -> None:
        for delivery in taken:
            delivery.task = asyncio.Task(self._handle(delivery), loop=self._loop, **_EAGER)

    async def _repair(self, exc: TransientError | ReplyError) -> None:
        if not isinstance(exc, ReplyError) or exc.code not in ("NOGROUP", "WRONGTYPE"):
            log.error("bus.read_failed", error=str(exc))
            await asyncio.sleep(self._heartbeat)
        try:
            await self._claims.begin()
        except (TransientError, ReplyError) as failure:
            log.warning("bus.group_failed", reason=str(failure))
            await asyncio.sleep(self._heartbeat)

    async def _unblock(self) -> bool:
        """Ends the read in progress; False when it does not wait in Redis."""
        with contextlib.suppress(TransientError, ReplyError):
            return await self._bus.unblock()
        return False

    async def _count(self, delivery: Delivery, deliveries: int) -> None:
        await self._claims.count(delivery, deliveries)

    # ── handling ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _handle(
        self, delivery: Delivery, effects: Sequence[Command] = (), error: BaseException | None = None
    ) -> None:
        """The one place where every failure ends: the entry is tried again, set aside, or left to its new owner.

        effects, error: what its handler has returned before, and why that could not be written.
        """
        handed_in = False
        try:
            try:
                if error is None:
                    effects = await self._attempt(delivery)
                else:
                    await self._reconsider(delivery, error)
            except EffectRefused as exc:
                effects = await self._note(delivery, str(exc))
            except PermanentError as exc:
                effects = await self._bury(delivery, effects, str(exc))
            until = self._claims.certain_until
            if delivery.lost or self._loop.time() >= until:
                until = await self._check_claim(delivery)
            self._settling.settle(delivery, effects, until)
            handed_in = True
        except Fenced:
            log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
        except TransientError as exc:
            log.warning("bus.try_again", entry_id=delivery.entry_id, reason=str(exc), attempt=delivery.deliveries)
        except Exception:
            # a bug in a handler must not stop the participant
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        finally:
            if not handed_in:
                self.slots.give_back(delivery)

    def _settled(self, delivery: Delivery, effects: Sequence[Command], error: BaseException | None) -> None:
        """What became of a handler's effects. No task waits for it: there is nothing more to do but in a few cases."""
        if error is not None and delivery.letter is not None and isinstance(error, EffectRefused):
            # it has been set aside all the same
            log.error("bus.undertaker_refused", entry_id=delivery.entry_id, error=str(error))
            error = None
        if error is None:
            self.handled += 1
            self.slots.give_back(delivery)
        else:
            delivery.task = self._loop.create_task(self._handle(delivery, effects, error))

    async def _attempt(self, delivery: Delivery) -> Sequence[Command]:
        """The effects of an entry. Raises PermanentError when it was tried often enough."""
        if delivery.deliveries > self._max_deliveries:
            raise PermanentError(f"gave up after {delivery.deliveries - 1} deliveries")
        if delivery not in self.slots.working:
            await delivery.slot()
        # it may have come before a pause of this process, and be somebody else's by now, or finished
        if delivery.lost or self._loop.time() >= self._claims.certain_until:
            await self._check_claim(delivery)
        while True:
            try:
                return await self._routes[delivery.stream].handler(delivery)
            except BusFull as exc:
                await self._wait_for_space(delivery, exc)
            except ReplyError as exc:
                # a key of another type in the place of one that it needs, which somebody may remove meanwhile
                if delivery.deliveries < self._max_deliveries:
                    raise TransientError(f"Redis refused a command: {exc}") from exc
                raise PermanentError(f"gave up after {delivery.deliveries} deliveries: {exc}") from exc
            except Local2Error:
                raise
            except Exception as exc:
                if delivery.deliveries < self._max_deliveries:
                    raise
                log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
                raise PermanentError(f"gave up after {delivery.deliveries} deliveries: {exc}") from exc

    async def _reconsider(self, delivery: Delivery, error: BaseException) -> None:
        """Returns when effects that were not written may be offered again, and raises why they may not."""
        if isinstance(error, BusFull):
            await self._wait_for_space(delivery, error)
        elif isinstance(error, ReplyError):
            raise PermanentError(f"its effects were refused: {error}") from error
        elif not isinstance(error, ConnectionLost):
            raise error
        else:
            delivery.broken += error.broken
            if delivery.broken >= MOST_TRIES:
                raise PermanentError(f"its effects broke the connection to Redis {delivery.broken} times")

    async def _wait_for_space(self, delivery: Delivery, exc: BusFull) -> None:
        """While Redis is full an entry waits where it is: that is not its fault, and uses up no delivery."""
        await self._pause(delivery, exc)
        await self._check_claim(delivery)

    async def _pause(self, delivery: Delivery, exc: BusFull) -> None:
        log.warning("bus.full", stream=delivery.stream, entry_id=delivery.entry_id, reason=str(exc))
        await asyncio.sleep(self._heartbeat)

    async def _check_claim(self, delivery: Delivery) -> float:
        """The loop's time until which the entry is certainly ours. Waits where nobody can say so. Raises Fenced."""
        while True:
            if delivery.lost:
                raise Fenced(f"{delivery.entry_id} was taken over")
            until = self._claims.certain_until
            if self._loop.time() < until:
                return until
            try:
                return await self._claims.ask(delivery)
            except BusFull as exc:
                # what its handler has returned is kept meanwhile
                await self._pause(delivery, exc)

    async def _bury(self, delivery: Delivery, refused: Sequence[Command], reason: str) -> Sequence[Command]:
        """What sets an entry aside, and tells whoever waits for it. Raises PermanentError when that is refused, too."""
        if delivery.letter is not None:
            if len(refused) == 1:
                raise PermanentError(reason)
            # what cannot be written for it must not keep a bad entry from being set aside
            log.error("bus.undertaker_refused", entry_id=delivery.entry_id, error=reason)
            return [delivery.letter]
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
        return [*effects, self._letter(delivery, reason)]

    async def _note(self, delivery: Delivery, reason: str) -> Sequence[Command]:
        """What sets aside an entry that is acknowledged already, because one of its effects could not be carried out.

        It is made pending again first, which a full Redis allows, as one that was tried often enough: should this
        process end before the letter is written, another one sets it aside.
        """
        log.error("bus.dead_letter", stream=delivery.stream, entry_id=delivery.entry_id, reason=reason)
        # nobody has taken it over, though it is no longer pending
        delivery.settling = True
        claim = ("XCLAIM", delivery.stream, self._group, self._replica, 0, delivery.entry_id)
        await self._bus.link.pipe_raw([(*claim, "RETRYCOUNT", self._max_deliveries + 1, "FORCE", "JUSTID")])
        return [self._letter(delivery, reason)]

    def _letter(self, delivery: Delivery, reason: str) -> Command:
        delivery.letter = burying(
            self._bus, delivery.stream, self._group, delivery.entry_id, delivery.fields, delivery.deliveries, reason
        )
        return delivery.letter

    # ── heartbeat and leaving ────────────────────────────────────────────────────────────────────────────────

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                for delivery in await self._claims.beat(self.slots):
                    log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
                    if delivery.task is not None:
                        delivery.task.cancel()
                if beyond := self.slots.beyond():
                    # renewing claims must not wait for long
                    await self._interrupt(beyond, self._heartbeat / 2)
                    await self._claims.hand_back([one for one in beyond if one.task is not None and one.task.done()])
            except (TransientError, ReplyError) as exc:
                log.warning("bus.heartbeat_failed", reason=str(exc))
            if self._claims.orphaned and self.slots.promised and not self._stopping:
                # the reader takes over, because it alone knows how many slots are free
                await self._unblock()

    async def _leave(self) -> None:
        """Finishes within `drain` seconds, makes the rest claimable at once, leaves no consumer behind. What only waits
        need not wait here."""
        await self._interrupt(self.slots.waiting())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                while self.slots.held:
                    self.slots.changed.clear()
                    await self.slots.changed.wait()
        await self._interrupt(list(self.slots.held.values()))
        try:
            async with asyncio.timeout(_HAND_OVER_SECONDS):
                await self._claims.hand_over()
        except (TimeoutError, TransientError) as exc:
            # the claims time out by themselves
            log.warning("bus.hand_over_failed", reason=str(exc))

    @staticmethod
    async def _interrupt(deliveries: Sequence[Delivery], seconds: float | None = None) -> None:
        """Ends the work on them, and waits for that, for so long at most."""
        tasks = [delivery.task for delivery in deliveries if delivery.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)


def _limits(routes: Mapping[str, Route]) -> dict[str, Limit]:
    return {stream: route.limit for stream, route in routes.items()}
