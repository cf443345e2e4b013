"""The judge's queue: answers to the newest question first; answers beyond its capacity are not judged.

A waiting answer stays on the bus: its entry is pending for this replica, which keeps the claim and releases its slot
(`Delivery.suspended`). After a crash, the next replica suspends the entry in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from services.critic.settings import CriticSettings

LeftOut = Literal["backlog", "age"]

# How many more answers than its share of them a replica may hold; the rest is handed back for the others.
_AHEAD = 64
# No more are read while those that wait take so much memory, in characters.
_MOST_HELD = 64_000_000
# A rank before all others.
_FIRST = (math.inf, math.inf)


@dataclass(slots=True, eq=False)
class _Waiting:
    rank: tuple[float, float]
    came: tuple[int, int]
    called: asyncio.Future[LeftOut | None]


class Turns:
    """At most `concurrency` answers are at the judge; when one leaves, the newest of those that wait is next.

    ready: returns when the judge may begin: only then is it said who is next. now: the bus's clock, in ms.
    """

    def __init__(
        self, settings: Callable[[], CriticSettings], ready: Callable[[], Awaitable[None]], now: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._ready = ready
        self._now = now
        # the newest one last
        self._waiting: list[_Waiting] = []
        self._judged = 0
        self._held = 0
        self._size = 0
        self._critics = 1
        # how many of all of them are for this replica; None: any number
        self._part: int | None = None
        self._others = 0
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def shared(self, critics: int, unfinished: int) -> None:
        """Says how many replicas there are, this one included, and how many answers all of them have not finished."""
        self._critics = max(1, critics)
        self._part = None if self._critics == 1 else math.ceil(unfinished / self._critics) + _AHEAD
        self._others = max(0, unfinished - self._held)

    def limit(self) -> int | None:
        """How many answers this replica may hold; None: any number. What it holds beyond that is for the others."""
        return self._held if self._size > _MOST_HELD else self._part

    @contextlib.asynccontextmanager
    async def turn(
        self,
        asked: tuple[int, int],
        came: tuple[int, int],
        size: int,
        suspended: Callable[[], AbstractAsyncContextManager[Any]] | None,
    ) -> AsyncIterator[LeftOut | None]:
        """Entered when it is an answer's turn, with None, or when it is left out, with the reason.

        asked, came: the ids of the question and of the answer on the bus. size: characters that it holds meanwhile.
        suspended: entered while it waits; None for one that has been tried before and ended its process, perhaps: it is
        next, and so much alone that its neighbours do not share its fate for ever.
        """
        self._held += 1
        self._size += size
        try:
            left = "age" if self._late(came) else await self._called(asked, came, suspended)
            try:
                yield left
            finally:
                if left is None:
                    self._leave()
        finally:
            self._held -= 1
            self._size -= size

    async def _called(
        self,
        asked: tuple[int, int],
        came: tuple[int, int],
        suspended: Callable[[], AbstractAsyncContextManager[Any]] | None,
    ) -> LeftOut | None:
        rank = _FIRST if suspended is None else min(asked, came)
        one = _Waiting(rank, came, asyncio.get_running_loop().create_future())
        # of two answers to one question the first comes first
        insort(self._waiting, one, key=lambda other: (other.rank, -other.came[0], -other.came[1]))
        self._bound()
        self._changed.set()
        try:
            async with suspended() if suspended is not None else contextlib.nullcontext():
                return await one.called
        except BaseException:
            if one in self._waiting:
                self._waiting.remove(one)
            elif not one.called.cancelled() and one.called.result() is None:
                self._leave()
            raise

    def _leave(self) -> None:
        self._judged -= 1
        self._changed.set()

    @staticmethod
    def _tell(one: _Waiting, left: LeftOut | None) -> bool:
        """False when it has just gone by itself."""
        if one.called.done():
            return False
        one.called.set_result(left)
        return True

    # ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────

    def _late(self, came: tuple[int, int]) -> bool:
        within = self._settings().judge_within
        return within is not None and self._now() - came[0] > within * 1000

    def _bound(self) -> None:
        """Of more than may wait the oldest are left out, by the replica that has more than its part of them."""
        most = self._settings().leave_ungraded_above
        if most is None:
            return
        while len(self._waiting) > max(math.ceil(most / self._critics), most - self._others):
            self._tell(self._waiting.pop(0), "backlog")

    def expire(self) -> None:
        """Leaves out what has waited for too long."""
        late = [one for one in self._waiting if self._late(one.came)]
        self._waiting = [one for one in self._waiting if one not in late]
        for one in late:
            self._tell(one, "age")
        # `concurrency` may be another one now
        self._changed.set()

    async def run(self) -> None:
        """Calls whoever is next, for as long as there is a judge."""
        while True:
            self._changed.clear()
            if self._waiting and self._judged < self._settings().concurrency:
                await self._ready()
                # others may have come or gone meanwhile
                if self._waiting and self._tell(self._waiting.pop(), None):
                    self._judged += 1
            else:
                await self._changed.wait()
