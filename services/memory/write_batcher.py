"""Batches of engrams: those that arrive during a user's write are the next write.

No write is delayed to make a batch larger. There are pauses between writes only while users wait for answers (see
`throttle`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.memory.engram import Engram
from services.memory.throttle import Pace
from services.memory.vectors import Vector
from shared.errors import TransientError

# As `Keeper.put`: writes engrams of one user, and gives those that are in the store then. It may be repeated.
Write = Callable[[str, Sequence[tuple[Engram, Vector]]], Awaitable[list[Engram]]]

# Engrams of one write. Larger ones are hardly cheaper for each, and a search waits longer for the store.
MOST = 64


@dataclass(eq=False, slots=True)
class _Wish:
    engram: Engram
    vector: Vector
    kept: asyncio.Future[list[Engram]]


class Gathering:
    """Open it with `open_gathering`."""

    def __init__(self, write: Write, pace: Pace, writers: asyncio.TaskGroup) -> None:
        self._write = write
        self._pace = pace
        self._writers = writers
        self._serving: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, deque[_Wish]] = {}
        # after a failure, and until as many succeed as usual: how many a user's next write has at most
        self._fewer: dict[str, int] = {}

    async def put(self, engram: Engram, vector: Vector) -> list[Engram]:
        """What is in the store then: the engram, or nothing when it was deleted meanwhile.

        Raises what its own write raised; an engram that cannot be written does not keep others from it.
        """
        wish = _Wish(engram, vector, asyncio.get_running_loop().create_future())
        if (waiting := self._waiting.get(engram.user_id)) is None:
            waiting = self._waiting[engram.user_id] = deque()
            task = self._writers.create_task(self._serve(engram.user_id, waiting))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        waiting.append(wish)
        # it ends with who waits for it: then it is left out when it has not been begun
        return await wish.kept

    def stop(self) -> None:
        """Breaks off what is still being written."""
        for task in list(self._serving):
            task.cancel()

    async def _serve(self, user_id: str, waiting: deque[_Wish]) -> None:
        """Until nothing waits. After a failure one at a time, and with each success twice as many: an engram that the
        store never takes is soon alone."""
        try:
            while waiting:
                most, began = await self._pace.turn(self._fewer.get(user_id, MOST))
                if not (batch := _batch(waiting, most)):
                    return
                if not await self._together(user_id, batch):
                    self._fewer[user_id] = 1
                elif (twice := 2 * self._fewer.pop(user_id, MOST)) < MOST:
                    self._fewer[user_id] = twice
                await self._pace.done(began)
        finally:
            del self._waiting[user_id]

    async def _together(self, user_id: str, batch: list[_Wish]) -> bool:
        """Whether they were written."""
        try:
            found = await self._write(user_id, [(wish.engram, wish.vector) for wish in batch])
        except Exception as exc:
            # not swallowed: whoever waits gets it
            if len(batch) > 1 and not isinstance(exc, TransientError):
                # one of them is at fault: the others must not be tried less often for it
                for wish in batch:
                    await self._together(user_id, [wish])
                return False
            for wish in batch:
                if not wish.kept.done():
                    wish.kept.set_exception(exc)
            return False
        kept = {engram.id: engram for engram in found}
        for wish in batch:
            if not wish.kept.done():
                wish.kept.set_result([kept[wish.engram.id]] if wish.engram.id in kept else [])
        return True


def _batch(waiting: deque[_Wish], most: int) -> list[_Wish]:
    """The next ones, in the order in which they came; an engram that is there twice is written twice."""
    batch: dict[str, _Wish] = {}
    while waiting and len(batch) < most and waiting[0].engram.id not in batch:
        wish = waiting.popleft()
        if not wish.kept.done():
            batch[wish.engram.id] = wish
    return list(batch.values())


@asynccontextmanager
async def open_gathering(write: Write, pace: Pace) -> AsyncIterator[Gathering]:
    """What is still being written at the end is broken off."""
    async with asyncio.TaskGroup() as writers:
        gathering = Gathering(write, pace, writers)
        try:
            yield gathering
        finally:
            gathering.stop()
