"""Back-pressure: refuse large messages before Redis is full; small messages and unfinished work keep the rest."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection

from shared.bus import Bus, BusFull
from shared.errors import TransientError

# Bytes. A message of at most this size is never refused here.
LARGE = 65_536
# Share of the server's memory limit above which no large message is accepted.
SCARCE = 0.75
# Share of the limit for the unfinished large messages of one user in one process, and its minimum in bytes: two of the
# largest request bodies.
_OF_ONE_USER = 1 / 16
_AT_LEAST = 8 * 1024**2
# Seconds after which Redis counts an admitted message in its memory.
_WRITTEN = 1.0


class BusNearlyFull(BusFull):
    """Little of Redis' memory is left, and large messages are refused."""


class TooMuchUnderWay(TransientError):
    """The unfinished large messages of one user have reached their share of Redis' memory."""


# Takes names of messages; returns the names of the unfinished ones.
UnderWay = Callable[[Collection[str]], Awaitable[Collection[str]]]


async def memory(bus: Bus) -> tuple[int, int] | None:
    """Return the used memory and the limit of Redis, in bytes; None without a limit."""
    text = (await bus.link.call("INFO", "memory")).decode()
    used, limit = (_figure(text, name) for name in ("used_memory", "maxmemory"))
    return (used, limit) if limit else None


def _figure(text: str, name: str) -> int:
    found = re.search(rf"^{name}:(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


class LargeMessages:
    """The unfinished large messages of this process, by user and name.

    under_way: called before a user is refused; None: `ended` reports the end of every message.
    """

    def __init__(self, bus: Bus, under_way: UnderWay | None = None) -> None:
        self._bus = bus
        self._under_way = under_way
        self._sizes: dict[str, dict[str, int]] = {}
        # (loop time, size) of messages that Redis may not have counted yet
        self._admitted: deque[tuple[float, int]] = deque()

    async def admit(self, user_id: str, name: str, size: int) -> None:
        """Count a message as unfinished. Not counted: a message of at most LARGE bytes, or without a memory limit.

        name: unique among the user's messages. size: in bytes. Raises TooMuchUnderWay when the user's earlier messages
        leave no room in the share, BusNearlyFull when Redis has too little memory left.
        """
        if size <= LARGE:
            return
        # Count before asking Redis: of concurrent messages, each is checked against the earlier ones.
        self._sizes.setdefault(user_id, {})[name] = size
        try:
            found = await memory(self._bus)
            if found is not None:
                used, limit = found
                await self._check_share(user_id, name, max(int(limit * _OF_ONE_USER), _AT_LEAST))
                # Redis holds a message at most twice: as an entry, and in a record or a reply.
                if used + 2 * (size + self._unwritten()) > SCARCE * limit:
                    raise BusNearlyFull(
                        f"the bus is nearly out of memory: requests of more than {LARGE:,} bytes are refused; "
                        "try again later"
                    )
        except BaseException:
            self.ended(user_id, name)
            raise
        if found is None:
            self.ended(user_id, name)
            return
        self._admitted.append((asyncio.get_running_loop().time(), size))

    def rename(self, user_id: str, name: str, new: str) -> None:
        """Rename a counted message, which keeps its place among the others; do nothing for any other."""
        sizes = self._sizes.get(user_id, {})
        if name in sizes:
            self._sizes[user_id] = {new if one == name else one: size for one, size in sizes.items()}

    def ended(self, user_id: str, name: str) -> None:
        """Stop counting a message."""
        sizes = self._sizes.get(user_id, {})
        sizes.pop(name, None)
        if not sizes:
            self._sizes.pop(user_id, None)

    async def _check_share(self, user_id: str, name: str, share: int) -> None:
        before = self._before(user_id, name)
        if before and sum(before.values()) + self._sizes[user_id][name] > share and self._under_way is not None:
            for ended in before.keys() - set(await self._under_way(list(before))):
                self.ended(user_id, ended)
            before = self._before(user_id, name)
        there = sum(before.values())
        if before and there + self._sizes[user_id][name] > share:
            raise TooMuchUnderWay(
                f"your unfinished large requests have {there:,} bytes, of at most {share:,}; "
                "wait until one of them has ended"
            )

    def _before(self, user_id: str, name: str) -> dict[str, int]:
        """Return the sizes of the user's earlier messages."""
        found: dict[str, int] = {}
        for one, size in self._sizes[user_id].items():
            if one == name:
                break
            found[one] = size
        return found

    def _unwritten(self) -> int:
        """Return the bytes that were admitted within the last second."""
        since = asyncio.get_running_loop().time() - _WRITTEN
        while self._admitted and self._admitted[0][0] < since:
            self._admitted.popleft()
        return sum(size for _, size in self._admitted)
