"""Saying that a replica is there: its registry entry, its inbox and its settings' description, kept by a heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.bus import Bus, BusFull, Command, ReplyError, order
from shared.bus.keys import schema_key, starts_key
from shared.errors import TransientError
from shared.participant.registry import ReplicaInfo, announcing, leaving, mend, still_there
from shared.telemetry.logging import get_logger

log = get_logger()

MISSED = 3
_INBOX_SECONDS = 60


class Presence:
    """What others know of a replica.

    read: how far the inbox has been read. told: what the registry is to say of the replica now.
    described: its settings' schema and start values, as JSON.
    full: why Redis takes no writes, as of the last heartbeat; None while it does.
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
    ) -> None:
        self._bus = bus
        self._participant = participant
        self._replica = replica
        self._inbox = inbox
        self._read = read
        self._told = told
        self.described = described
        # Whether Redis has refused the description: the next heartbeat writes it.
        self._undescribed = False
        self.full: str | None = None

    async def arrive(self, *, patient: bool) -> None:
        """Opens the inbox and describes the settings, before anybody asks.

        patient: a Redis that is full is waited for; else the heartbeat makes up for it when there is room.
        """
        while True:
            try:
                await self._bus.pulse.pipe(self._opening())
                break
            except TransientError as exc:
                log.warning("presence.waiting", reason=str(exc))
                self.full = str(exc) if isinstance(exc, BusFull) else None
                if not patient:
                    return
            await asyncio.sleep(1.0)
        # a statistic: a user of the bus who may not write it can do without
        await self._bus.pulse.pipe_raw([("INCR", starts_key(self._participant))])

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
            await self._bus.pulse.call("SET", schema_key(self._participant), described)
        except TransientError as exc:
            log.warning("presence.waiting", reason=str(exc))
            return
        self._undescribed = False

    async def announce(self, heartbeat: float) -> None:
        """Writes the registry entry, which goes after three heartbeats."""
        ttl = int(heartbeat * MISSED * 1000)
        there: list[Command] = [("EXISTS", schema_key(self._participant)), ("EXPIRE", self._inbox, _INBOX_SECONDS)]
        try:
            replies = await self._bus.pulse.pipe([*announcing(self._told(), ttl), *there])
        except BusFull as exc:
            self.full = str(exc)
            # nobody is to think it dead, and start it anew, because Redis is full
            await self._bus.pulse.call(*still_there(self._participant, self._replica, ttl))
            raise
        self.full = None
        if self._undescribed or not all(replies[-len(there) :]):
            # flushed, or expired while this process was stopped: answers go to an inbox that is there only
            await self._bus.pulse.pipe(self._opening())
            self._undescribed = False

    async def _tidy(self) -> None:
        """Others may write to the inbox whatever they like: what was read of it goes, and what shuts it."""
        ms, number = order(self._read())
        # to the last one: it may have words of a session that is deleted now
        await self._bus.pulse.pipe_raw([("XTRIM", self._inbox, "MINID", "=", f"{ms}-{number + 1}")])
        await self._bus.unblock_stream(self._inbox)

    async def run(self, heartbeat: Callable[[], float]) -> None:
        """Announces with every heartbeat until cancelled, whatever the rest that a heartbeat does may take."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + heartbeat()
            beat = (self.announce(heartbeat()), self._tidy(), self._bus.tell_time(), self._bus.keep_scripts())
            for failure in await asyncio.gather(*beat, return_exceptions=True):
                await self._missed(failure)
            await asyncio.sleep(due - now())

    async def _missed(self, failure: BaseException | None) -> None:
        """Goes on after what Redis refuses or cannot do now; anything else is raised."""
        if failure is None:
            return
        if not isinstance(failure, (TransientError, ReplyError)):
            raise failure
        log.warning("service.heartbeat_failed", reason=str(failure))
        if isinstance(failure, ReplyError) and failure.code == "WRONGTYPE":
            with contextlib.suppress(TransientError, ReplyError):
                await mend(self._bus.pulse)

    async def leave(self) -> None:
        """Takes the entry and the inbox away, when Redis answers within a second."""
        with contextlib.suppress(TimeoutError, TransientError, ReplyError):
            async with asyncio.timeout(1.0):
                await self._bus.pulse.pipe_raw([*leaving(self._participant, self._replica), ("DEL", self._inbox)])
