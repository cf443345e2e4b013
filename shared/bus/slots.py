"""What a replica holds, and how much more it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from shared.bus.port import Command

# Entries of one stream held at the same time: a number, or what says it now; None: as many as there are slots.
Limit = int | Callable[[], int | None] | None


@dataclass(eq=False, slots=True)
class Delivery:
    """An entry that this replica holds; `lost` when somebody else has taken it over, `settling` while its effects and
    its acknowledgement are being written. `broken`: how often the connection broke over them. `letter`: what sets it
    aside, once that is to be."""

    stream: str
    entry_id: str
    fields: list[bytes]
    deliveries: int
    _slots: Slots
    task: asyncio.Task[None] | None = None
    lost: bool = False
    settling: bool = False
    broken: int = 0
    letter: Command | None = None

    async def slot(self) -> None:
        """Waits for a slot, when there was none as it was taken: two came at once where one was waited for."""
        if self not in self._slots.working:
            async with self._aside():
                pass

    @contextlib.asynccontextmanager
    async def parked(self) -> AsyncIterator[None]:
        """Gives the slot to other work while this entry waits for something (its claim is kept). Where its replica dies
        meanwhile that was not its fault, and uses up no delivery."""
        async with self._aside():
            await self._slots.count(self, self.deliveries - 1)
            yield
        await self._slots.count(self, self.deliveries)

    @contextlib.asynccontextmanager
    async def _aside(self) -> AsyncIterator[None]:
        self._slots.working.discard(self)
        self._slots.changed.set()
        try:
            yield
            await self._slots.free_one()
        finally:
            self._slots.working.add(self)


class Slots:
    """The entries held, those of them that are being worked on, and the room that is left.

    size: entries worked on at the same time. limits: entries of one stream held at the same time, parked ones included.
    last: the number of deliveries after which an entry is given up. unblock: ends the read in progress. count: tells
    Redis how many deliveries one has had.
    """

    def __init__(
        self,
        size: int,
        limits: dict[str, Limit],
        last: int,
        unblock: Callable[[], Awaitable[bool]],
        count: Callable[[Delivery, int], Awaitable[None]],
    ) -> None:
        self.size = size
        self.held: dict[tuple[str, str], Delivery] = {}
        self.working: set[Delivery] = set()
        # promised to the read in progress, and wanted back by what was parked
        self.promised = 0
        self.wanted = 0
        self.changed = asyncio.Event()
        self.limits = limits
        self.last = last
        self._unblock = unblock
        self.count = count

    def take(self, delivery: Delivery) -> bool:
        """False when it is held already. Beyond the room that is left it waits for a slot (see Delivery.slot)."""
        key = (delivery.stream, delivery.entry_id)
        if key in self.held:
            return False
        self.held[key] = delivery
        if len(self.working) < self.size:
            self.working.add(delivery)
        return True

    def give_back(self, delivery: Delivery) -> None:
        del self.held[delivery.stream, delivery.entry_id]
        self.working.discard(delivery)
        self.changed.set()

    @property
    def last_chance(self) -> bool:
        """What has failed all times but one is tried alone: if it kills the process, its neighbours survive it."""
        return self.last > 1 and any(delivery.deliveries == self.last for delivery in self.working)

    def room(self) -> int:
        return 0 if self.last_chance else self.size - len(self.working) - self.wanted

    def room_of(self, stream: str) -> int | None:
        """How many more entries of a stream may be held; None when it has no limit of its own."""
        limit = self.limits[stream]
        if callable(limit):
            limit = limit()
        return None if limit is None else max(0, limit - sum(held == stream for held, _ in self.held))

    def waiting(self) -> list[Delivery]:
        """What is held and not worked on: it waits for something else."""
        return [delivery for delivery in self.held.values() if delivery not in self.working]

    def beyond(self) -> list[Delivery]:
        """Of what waits, as much as there is beyond the limits, which may have become lower: of the old and the new."""
        found: list[Delivery] = []
        for stream, limit in self.limits.items():
            most = limit() if callable(limit) else limit
            over = 0 if most is None else sum(held == stream for held, _ in self.held) - most
            if over > 0:
                waiting = [delivery for delivery in self.waiting() if delivery.stream == stream]
                found += waiting[:: max(1, len(waiting) // over)][:over]
        return found

    async def free_one(self) -> None:
        """Waits until a slot is free for work that goes on; it comes before new entries."""
        self.wanted += 1
        try:
            while len(self.working) + self.promised >= self.size:
                self.changed.clear()
                # a read that may wait for long gives back what it was promised
                if not self.promised:
                    await self.changed.wait()
                elif not await self._unblock():
                    await asyncio.sleep(0.01)
        finally:
            self.wanted -= 1
