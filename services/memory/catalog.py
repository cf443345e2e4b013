"""Which engrams there are, by user and time: what the store cannot list in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Set
from itertools import islice
from typing import NamedTuple

from services.memory.engram import Engram


class Known(NamedTuple):
    """An engram's id, owner, time (ms) and kind. shown: see Engram."""

    id: str
    user_id: str
    time: int
    kind: str
    shown: bool = True


class Catalog:
    """In memory, made from the store at the start. About 200 bytes an engram.

    Answers and what somebody had remembered (notes and topics) are told apart: `asked` is the latter.
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[str, int]] = {}
        self._sorted: dict[str, list[tuple[int, str]]] = {}
        self._owners: dict[str, str] = {}
        self._asked: set[str] = set()
        self._hidden: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, engrams: Iterable[Engram | Known]) -> None:
        for engram in engrams:
            times = self._times.setdefault(engram.user_id, {})
            before = times.get(engram.id)
            if before == engram.time:
                continue
            order = self._sorted.setdefault(engram.user_id, [])
            if before is not None:
                order.pop(bisect_left(order, (before, engram.id)))
            times[engram.id] = engram.time
            insort(order, (engram.time, engram.id))
            self._owners[engram.id] = engram.user_id
            if engram.kind != "turn":
                self._asked.add(engram.id)
            if not engram.shown:
                self._hidden.setdefault(engram.user_id, set()).add(engram.id)

    def remove(self, user_id: str, ids: Iterable[str]) -> None:
        times, order = self._times.get(user_id, {}), self._sorted.get(user_id, [])
        for engram_id in ids:
            before = times.pop(engram_id, None)
            if before is not None:
                order.pop(bisect_left(order, (before, engram_id)))
                self._owners.pop(engram_id, None)
                self._asked.discard(engram_id)
                self._hidden.get(user_id, set()).discard(engram_id)

    def remove_user(self, user_id: str) -> None:
        for engram_id in self._times.pop(user_id, {}):
            self._owners.pop(engram_id, None)
            self._asked.discard(engram_id)
        self._sorted.pop(user_id, None)
        self._hidden.pop(user_id, None)

    def hidden(self, user_id: str) -> Set[str]:
        """Return the ids of engrams that the user has not seen: no search returns them."""
        return self._hidden.get(user_id, frozenset())

    def owner(self, engram_id: str) -> str | None:
        return self._owners.get(engram_id)

    def users(self) -> list[str]:
        return sorted(user_id for user_id, times in self._times.items() if times)

    def count(self, user_id: str) -> int:
        return len(self._times.get(user_id, ()))

    def ids(self, user_id: str) -> list[str]:
        return list(self._times.get(user_id, ()))

    def newest(self, user_id: str, limit: int, cursor: tuple[int, str] | None = None) -> list[tuple[int, str]]:
        """(time, id), newest first, beginning behind the cursor."""
        order = self._sorted.get(user_id, [])
        end = len(order) if cursor is None else bisect_left(order, cursor)
        return order[max(0, end - limit) : end][::-1]

    def oldest(self, user_id: str, limit: int, *, asked: bool, before: int) -> list[str]:
        """The ids of those from before a moment (ms), the oldest first."""
        order = self._sorted.get(user_id, [])
        old = (engram_id for _, engram_id in islice(order, bisect_left(order, (before,))))
        return list(islice((one for one in old if (one in self._asked) == asked), limit))

    def census(self, *, asked: bool, before: int) -> tuple[int, int | None, int]:
        """Of all users: how many there are, the time of the oldest, and how many are from before that moment."""
        kept, due, oldest = 0, 0, list[int]()
        for order in self._sorted.values():
            times = [at for at, engram_id in order if (engram_id in self._asked) == asked]
            kept += len(times)
            due += bisect_left(times, before)
            oldest += times[:1]
        return kept, min(oldest, default=None), due
