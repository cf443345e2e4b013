"""The entries that a replica holds, and how many more it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

# The most entries of one stream that a replica holds at the same time: a number, or a function that returns it.
# None: as many as there are slots.
Limit = int | Callable[[], int | None] | None


@dataclass(eq=False, slots=True)
class Delivery:
    """One attempt at one entry, from its read to its acknowledgement.

    deliveries: how often the entry was delivered, this attempt included.
    lost: another replica owns the entry. committing: its acknowledgement is being written, so that the entry may not be
    pending any more although no other replica took it.
    """

    stream: str
    entry_id: str
    fields: list[bytes]
    deliveries: int
    _slots: Slots
    task: asyncio.Task[None] | None = None
    lost: bool = False
    committing: bool = False

    async def acquire_slot(self) -> None:
        """Wait for a slot, if the read returned more entries than there were free slots."""
        if self not in self._slots.working:
            await self._slots.acquire(self)

    @contextlib.asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Release the slot while the handler waits for something else; the claim is still renewed.

        A suspended attempt is no delivery: if the replica dies meanwhile, the entry was not the reason.
        """
        self._slots.release(self)
        await self._slots.set_deliveries(self, self.deliveries - 1)
        try:
            yield
        except Exception:
            await self._resume()
            raise
        await self._resume()

    async def _resume(self) -> None:
        await self._slots.acquire(self)
        await self._slots.set_deliveries(self, self.deliveries)


class Slots:
    """The entries that a replica holds, and those of them that occupy a slot.

    size: the number of slots. limits: the limit of each stream, suspended entries included.
    max_deliveries: deliveries after which an entry is given up. end_read: ends the blocking read; False if none waits
    in Redis. set_deliveries: stores the number of deliveries of an entry in Redis.
    """

    def __init__(
        self,
        size: int,
        limits: dict[str, Limit],
        max_deliveries: int,
        end_read: Callable[[], Awaitable[bool]],
        set_deliveries: Callable[[Delivery, int], Awaitable[None]],
    ) -> None:
        self.size = size
        self.limits = limits
        self.max_deliveries = max_deliveries
        self.set_deliveries = set_deliveries
        self._end_read = end_read
        self.held: dict[tuple[str, str], Delivery] = {}
        self.working: set[Delivery] = set()
        # Slots that the read in progress may fill, and resuming entries that wait for a slot.
        self.reserved_for_read = 0
        self.waiters = 0
        self.changed = asyncio.Event()

    def add(self, delivery: Delivery) -> bool:
        """Hold an entry; it occupies a slot if one is free (see Delivery.acquire_slot). False: it is held already."""
        key = (delivery.stream, delivery.entry_id)
        if key in self.held:
            return False
        self.held[key] = delivery
        if len(self.working) < self.size:
            self.working.add(delivery)
        return True

    def remove(self, delivery: Delivery) -> None:
        del self.held[delivery.stream, delivery.entry_id]
        self.release(delivery)

    def release(self, delivery: Delivery) -> None:
        """Free the slot of an entry that stays held."""
        self.working.discard(delivery)
        self.changed.set()

    @property
    def has_final_attempt(self) -> bool:
        """Whether an entry is at its last attempt. It runs alone: if it kills the process, no other entry suffers."""
        return self.max_deliveries > 1 and any(one.deliveries == self.max_deliveries for one in self.working)

    def free(self) -> int:
        """Return how many more entries may be worked on; negative when resuming entries wait for slots."""
        return 0 if self.has_final_attempt else self.size - len(self.working) - self.waiters

    def free_of(self, stream: str) -> int | None:
        """Return how many more entries of a stream may be held; None if it has no limit of its own."""
        over = self._over_limit_of(stream)
        return None if over is None else max(0, -over)

    def suspended(self) -> list[Delivery]:
        """Return the entries without a slot."""
        return [delivery for delivery in self.held.values() if delivery not in self.working]

    def over_limit(self) -> list[Delivery]:
        """Return suspended entries above the limits, which may have been lowered; the old and the new ones evenly."""
        found: list[Delivery] = []
        for stream in self.limits:
            over = self._over_limit_of(stream) or 0
            if over > 0:
                suspended = [delivery for delivery in self.suspended() if delivery.stream == stream]
                found += suspended[:: max(1, len(suspended) // over)][:over]
        return found

    def _over_limit_of(self, stream: str) -> int | None:
        """Return how many entries of a stream are held above its limit; None if it has none."""
        limit = self.limits[stream]
        if callable(limit):
            limit = limit()
        return None if limit is None else sum(held == stream for held, _ in self.held) - limit

    async def acquire(self, delivery: Delivery) -> None:
        """Wait until a slot is free for an entry that resumes. It comes before new entries."""
        self.waiters += 1
        try:
            while len(self.working) >= self.size:
                self.changed.clear()
                await self.changed.wait()
        finally:
            self.waiters -= 1
        self.working.add(delivery)
        if len(self.working) + self.reserved_for_read > self.size:
            # The read in progress may bring an entry for this slot: end it, so that the next one asks for fewer.
            await self._end_read()
