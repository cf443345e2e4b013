"""Renewing a consumer's claims on pending entries, and reclaiming stale ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from shared.bus.replies import Command, ReplyError
from shared.bus.scripts import HAND_OVER, RENEW_CLAIMS, SET_DELIVERY_COUNT, UNOWNED_CONSUMER
from shared.bus.slots import Delivery, Slots
from shared.bus.streams import Bus, create_group_command, entries
from shared.bus.visibility import Visibility, Watch
from shared.errors import TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

# A lost reply of a read has at most as many entries as a replica has slots and streams.
_MOST_LOST = 10_000


class Claims:
    """The claims of one consumer of a group, on the streams that it reads.

    Each heartbeat renews them. An entry whose claim was not renewed for the visibility timeout is stale. A replica
    reclaims it only after it has itself observed the bus for that long without a gap: after an outage every claim looks
    stale, and the live replicas renew theirs first (see Watch).

    renewed: the event loop's time at which the last renewal of all claims began.
    reclaimable: streams with stale entries, or with entries of the unowned consumer.
    not_streams: streams whose key has another type. The other streams are read meanwhile.
    """

    def __init__(self, bus: Bus, group: str, replica: str, streams: Sequence[str], visibility: Visibility) -> None:
        self._bus = bus
        self._group = group
        self._replica = replica
        self._visibility = visibility
        self.streams = list(streams)
        self._watch = Watch(visibility.gap_ms)
        self.renewed = 0.0
        self.reclaimable: set[str] = set()
        self.not_streams: set[str] = set()

    @property
    def certain_until(self) -> float:
        """The event loop's time until which no other replica can have claimed an entry that was held at the renewal."""
        return self.renewed + self._visibility.certain

    async def create_groups(self) -> None:
        """Create the groups, or find those that exist already; update `not_streams`.

        Raises TransientError when this user of Redis may create none and another participant has not done it yet.
        """
        if not self.renewed:
            # Nothing is held before the first call, so there is nothing to renew.
            self.renewed = asyncio.get_running_loop().time()
        # A copy, because `add` appends streams meanwhile.
        streams = list(self.streams)
        created = await self._bus.heartbeat_link.pipe_raw(
            [create_group_command(stream, self._group) for stream in streams]
        )
        for stream, reply in zip(streams, created, strict=True):
            code = reply.code if isinstance(reply, ReplyError) else ""
            if code != "WRONGTYPE":
                self.not_streams.discard(stream)
            elif stream not in self.not_streams:
                self.not_streams.add(stream)
                log.error("bus.not_a_stream", stream=stream, error=str(reply))
            if code == "NOPERM":
                if self._group not in await self._bus.groups(stream):
                    raise TransientError(
                        f"the group {self._group} on {stream} is missing: a gateway or generator creates it"
                    )
            elif code not in ("", "BUSYGROUP", "WRONGTYPE"):
                raise reply

    # ── renewing ─────────────────────────────────────────────────────────────────────────────────────────────

    async def renew(self, slots: Slots) -> list[Delivery]:
        """Renew all claims; mark the deliveries whose entries were taken over as lost, and return them.

        Raises BusFull when Redis refuses all writes, so that no replica can renew or take over a claim.
        """
        started = asyncio.get_running_loop().time()
        if self.not_streams:
            await self.create_groups()
        lost: list[Delivery] = []
        for stream in list(self.streams):
            ids = [entry_id for held, entry_id in slots.held if held == stream]
            for entry_id in ids if stream in self.not_streams else await self._renew(stream, ids):
                delivery = slots.held.get((stream, entry_id))
                if delivery is not None and not delivery.committing:
                    # At once: its handler may end before this heartbeat, or swallow a cancellation.
                    delivery.lost = True
                    lost.append(delivery)
        self.renewed = started
        return lost

    async def _renew(self, stream: str, ids: Sequence[str]) -> list[str]:
        """Renew claims on one stream; return the ids that were taken over. Update `reclaimable`."""
        try:
            now, unowned, stale, lost = await self._bus.heartbeat_link.call(*self._renewal(stream, ids))
        except ReplyError as exc:
            if "NOGROUP" not in str(exc) and exc.code != "WRONGTYPE":
                raise
            await self.create_groups()
            return list(ids)
        watched = self._watch.observe(now) >= self._visibility.timeout_ms
        if unowned or (stale and watched):
            self.reclaimable.add(stream)
        return [entry_id.decode() for entry_id in lost]

    def _renewal(self, stream: str, ids: Sequence[str] = ()) -> Command:
        timeout_ms = self._visibility.timeout_ms
        return RENEW_CLAIMS((stream,), self._group, self._replica, UNOWNED_CONSUMER, timeout_ms, *ids)

    async def set_deliveries(self, delivery: Delivery, deliveries: int) -> None:
        """Store the number of deliveries that the next owner of an entry will see."""
        with suppress(TransientError, ReplyError):
            await self._bus.link.call(
                *SET_DELIVERY_COUNT((delivery.stream,), self._group, self._replica, delivery.entry_id, deliveries)
            )

    # ── reclaiming ───────────────────────────────────────────────────────────────────────────────────────────

    async def lost_in_flight(self, stream: str, slots: Slots) -> list[Delivery]:
        """Return entries that are pending for this replica but that it does not hold: the reply of a read got lost."""
        # On the connection of the acknowledgements: entries that were just acknowledged are not pending any more.
        pending = ("XPENDING", stream, self._group, "-", "+", _MOST_LOST, self._replica)
        rows = await self._bus.link.call(*pending)
        found: list[Delivery] = []
        for entry_id, _owner, _idle, deliveries in rows:
            if (stream, entry_id.decode()) not in slots.held:
                found += await self._claim(stream, 0, {entry_id: deliveries}, slots, "RETRYCOUNT", deliveries)
        return found

    async def reclaim(self, stream: str, count: int, slots: Slots) -> list[Delivery]:
        """Claim at most `count` entries: of the unowned consumer, then stale ones."""
        unowned = await self._bus.link.call("XPENDING", stream, self._group, "-", "+", count, UNOWNED_CONSUMER)
        found = await self._claim_rows(stream, unowned, 0, slots)
        if len(unowned) < count:
            idle = self._visibility.timeout_ms
            pending = ("XPENDING", stream, self._group, "IDLE", idle, "-", "+", count - len(unowned))
            stale = await self._bus.link.call(*pending)
            # Every process may have been paused since the heartbeat, so that all claims look stale now.
            now, *_ = await self._bus.heartbeat_link.call(*self._renewal(stream))
            if self._watch.observe(now) >= idle:
                found += await self._claim_rows(stream, stale, idle, slots)
        return found

    async def _claim_rows(self, stream: str, rows: Sequence[Any], idle: int, slots: Slots) -> list[Delivery]:
        """Claim entries of XPENDING. An entry at its last attempt comes alone, beside entries to give up."""
        deliveries_of: dict[bytes, int] = {}
        alone = slots.has_final_attempt
        for entry_id, _owner, _idle, deliveries in rows:
            if (stream, entry_id.decode()) not in slots.held and not (alone and deliveries < slots.max_deliveries):
                deliveries_of[entry_id] = deliveries + 1
                alone = alone or deliveries + 1 == slots.max_deliveries > 1
        return await self._claim(stream, idle, deliveries_of, slots)

    async def _claim(
        self, stream: str, idle: int, deliveries_of: Mapping[bytes, int], slots: Slots, *options: str | int
    ) -> list[Delivery]:
        """Claim entries, except those that were acknowledged or renewed meanwhile."""
        if not deliveries_of:
            return []
        claim = ("XCLAIM", stream, self._group, self._replica, idle, *deliveries_of, *options)
        return [
            Delivery(stream, entry_id, fields, deliveries_of[entry_id.encode()], slots)
            for entry_id, fields in entries(await self._bus.link.call(*claim))
        ]

    # ── releasing ────────────────────────────────────────────────────────────────────────────────────────────

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Transfer entries to the unowned consumer: any replica may claim them. This attempt is no delivery."""
        transfers: list[Command] = []
        for one in deliveries:
            if not one.lost:
                claim = ("XCLAIM", one.stream, self._group, UNOWNED_CONSUMER, 0, one.entry_id)
                transfers.append((*claim, "RETRYCOUNT", one.deliveries - 1, "JUSTID"))
        if transfers:
            await self._bus.heartbeat_link.pipe_raw(transfers)

    async def release_all(self) -> None:
        """Transfer every entry to the unowned consumer, and remove this consumer from the groups."""
        remaining = list(self.streams)
        while remaining:
            scripts = [HAND_OVER((stream,), self._group, self._replica, UNOWNED_CONSUMER) for stream in remaining]
            moved = await self._bus.link.pipe_raw(scripts)
            remaining = [one for one, count in zip(remaining, moved, strict=True) if isinstance(count, int) and count]
