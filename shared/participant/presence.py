"""Register a replica: its registry entry, its inbox and the description of its settings, renewed by a heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.bus import Bus, BusFull, Command, ReplyError, order
from shared.bus.keys import schema_key, starts_key
from shared.bus.visibility import Visibility
from shared.errors import TransientError
from shared.participant.registry import ReplicaInfo, announcing, leaving, repair_index, still_there
from shared.telemetry.logging import get_logger

log = get_logger()

_INBOX_SECONDS = 60


class Presence:
    """A replica's keys in Redis that other processes read.

    read: returns the id up to which the inbox has been read. told: returns the registry entry to write.
    described: the schema and start values of the settings, as JSON.
    full: why Redis refused the last heartbeat's writes; None if it did not.
    """

    def __init__(
        self,
        bus: Bus,
        participant: str,
        replica: str,
        inbox: str,
        read: Callable[[], str],
        told: Callable[[], ReplicaInfo],
        described: bytes,
        heartbeat: float,
    ) -> None:
        self._bus = bus
        self._participant = participant
        self._replica = replica
        self._inbox = inbox
        self._read = read
        self._told = told
        self.described = described
        self._visibility = Visibility(heartbeat)
        # Whether Redis has refused the description: the next heartbeat writes it.
        self._undescribed = False
        self.full: str | None = None

    async def register(self, *, patient: bool) -> None:
        """Create the inbox and write the description of the settings.

        patient: wait while Redis is full; otherwise a later heartbeat repeats the writes.
        """
        while True:
            try:
                await self._bus.heartbeat_link.pipe(self._opening())
                break
            except TransientError as exc:
                log.warning("presence.waiting", reason=str(exc))
                self.full = str(exc) if isinstance(exc, BusFull) else None
                if not patient:
                    return
            await asyncio.sleep(1.0)
        # A statistic: a user of Redis without the right to write it starts without.
        await self._bus.heartbeat_link.pipe_raw([("INCR", starts_key(self._participant))])

    def _opening(self) -> list[Command]:
        return [
            ("SET", schema_key(self._participant), self.described),
            ("XADD", self._inbox, "*", "type", "started"),
            ("EXPIRE", self._inbox, _INBOX_SECONDS),
        ]

    async def describe(self, described: bytes) -> None:
        """Replace the description of the settings. When Redis refuses the write, a later heartbeat repeats it."""
        self.described = described
        self._undescribed = True
        try:
            await self._bus.heartbeat_link.call("SET", schema_key(self._participant), described)
        except TransientError as exc:
            log.warning("presence.waiting", reason=str(exc))
            return
        self._undescribed = False

    async def announce(self) -> None:
        """Write the registry entry, which expires after the visibility timeout."""
        ttl = self._visibility.timeout_ms
        there: list[Command] = [("EXISTS", schema_key(self._participant)), ("EXPIRE", self._inbox, _INBOX_SECONDS)]
        try:
            replies = await self._bus.heartbeat_link.pipe([*announcing(self._told(), ttl), *there])
        except BusFull as exc:
            self.full = str(exc)
            # A full Redis must not make a live replica look dead: its supervisor would restart it.
            await self._bus.heartbeat_link.call(*still_there(self._participant, self._replica, ttl))
            raise
        self.full = None
        if self._undescribed or not all(replies[-len(there) :]):
            # Redis was flushed, or the keys expired while this process was stopped. Workers answer only to an inbox
            # that exists.
            await self._bus.heartbeat_link.pipe(self._opening())
            self._undescribed = False

    async def _tidy(self) -> None:
        """Remove the inbox entries that were read, and an id that would block further ones."""
        ms, number = order(self._read())
        # Including the last one: it may hold text of a session that is deleted now.
        await self._bus.heartbeat_link.pipe_raw([("XTRIM", self._inbox, "MINID", "=", f"{ms}-{number + 1}")])
        await self._bus.reset_exhausted_ids(self._inbox)

    async def run(self) -> None:
        """Announce with every heartbeat until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + self._visibility.heartbeat
            beat = (self.announce(), self._tidy(), self._bus.learn_time(), self._bus.load_scripts())
            for failure in await asyncio.gather(*beat, return_exceptions=True):
                await self._missed(failure)
            await asyncio.sleep(due - now())

    async def _missed(self, failure: BaseException | None) -> None:
        """Log a failure of Redis and go on; raise any other failure."""
        if failure is None:
            return
        if not isinstance(failure, (TransientError, ReplyError)):
            raise failure
        log.warning("service.heartbeat_failed", reason=str(failure))
        if isinstance(failure, ReplyError) and failure.code == "WRONGTYPE":
            with contextlib.suppress(TransientError, ReplyError):
                await repair_index(self._bus.heartbeat_link)

    async def deregister(self) -> None:
        """Remove the entry and the inbox, if Redis answers within a second."""
        with contextlib.suppress(TimeoutError, TransientError, ReplyError):
            async with asyncio.timeout(1.0):
                await self._bus.heartbeat_link.pipe_raw(
                    [*leaving(self._participant, self._replica), ("DEL", self._inbox)]
                )
