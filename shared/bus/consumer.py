"""Reading work streams as one consumer of a group: at least once, by one replica at a time.

A consumer reads no more entries than it has slots for (slots.py), keeps its claims and reclaims stale ones (claims.py),
runs a handler for each entry, and writes the effects that the handler returns together with the acknowledgement.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.bus.claims import Claims
from shared.bus.connection import MAX_ATTEMPTS
from shared.bus.dead_letters import dead_letter_command
from shared.bus.keys import nothing_key
from shared.bus.replies import BusFull, Command, ConnectionLost, ReplyError
from shared.bus.slots import Delivery, Limit, Slots
from shared.bus.streams import Bus, entries
from shared.bus.visibility import Visibility
from shared.errors import Fenced, Local2Error, PermanentError, TransientError
from shared.telemetry.logging import get_logger

log = get_logger()

_RELEASE_TIMEOUT_S = 2.0
# A read leaves out streams at their limit. It blocks only this long then, so that they are read again soon.
_SHORT_BLOCK_S = 0.05

# Returns the commands that make the effects of an entry visible. They are written with the acknowledgement.
Handler = Callable[[Delivery], Awaitable[Sequence[Command]]]
# Called with the reason when an entry is given up; returns the commands to write with the dead letter.
OnDeadLetter = Callable[[Delivery, str], Awaitable[Sequence[Command]]]


class _PartlyWritten(PermanentError):
    """Redis refused one of the effects inside the transaction; the others hold."""


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of one stream's entries.

    limit: entries of the stream held at the same time, suspended ones included; None: as many as there are slots.
    """

    handler: Handler
    on_dead_letter: OnDeadLetter | None = None
    limit: Limit = None


class Consumer:
    """One replica's part of a consumer group over one or more work streams.

    heartbeat: seconds between two renewals of its claims (see Visibility). max_deliveries: deliveries after which an
    entry becomes a dead letter. drain: seconds in which a stopping consumer finishes what it holds.
    handled: entries that were acknowledged.
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
        self._claims = Claims(bus, group, replica, list(routes), Visibility(heartbeat))
        self.slots = Slots(concurrency, _limits(routes), max_deliveries, self._end_read, self._claims.set_deliveries)
        self.handled = 0
        # The streams, in the order in which the next reads take them.
        self._order = deque(self._routes)
        self._stopping = False
        self._verifying = asyncio.Lock()

    @property
    def held(self) -> Mapping[tuple[str, str], Delivery]:
        """The entries in flight, by stream and id."""
        return self.slots.held

    @property
    def concurrency(self) -> int:
        return self.slots.size

    def resize(self, concurrency: int) -> None:
        """Change the number of slots."""
        self.slots.size = concurrency
        self.slots.changed.set()

    async def add(self, routes: Mapping[str, Route]) -> None:
        """Read further streams from now on."""
        self._routes.update(routes)
        self.slots.limits.update(_limits(routes))
        self._claims.streams += routes
        with contextlib.suppress(TransientError, ReplyError):
            # A read that finds no group creates it.
            await self._claims.create_groups()
        self._order.extend(routes)
        self.slots.changed.set()
        if self.slots.reserved_for_read:
            await self._end_read()

    async def run(self, stop: asyncio.Event) -> None:
        """Read and handle entries until `stop` is set; then finish or release what is held."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            starting = tasks.create_task(self._create_groups())
            stopped = tasks.create_task(stop.wait())
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                starting.cancel()
                return
            renewing = tasks.create_task(self._renew_claims())
            reading = tasks.create_task(self._read_entries())
            await stopped
            self._stopping = True
            self.slots.changed.set()
            ending = tasks.create_task(self._end_read())
            # A blocking read ends within this time, unless Redis is away.
            await asyncio.wait({reading}, timeout=self._bus.block + 0.5)
            reading.cancel()
            ending.cancel()
            await self._leave()
            renewing.cancel()

    async def _create_groups(self) -> None:
        while True:
            try:
                return await self._claims.create_groups()
            except (TransientError, ReplyError) as exc:
                log.warning("bus.group_failed", reason=str(exc))
            await asyncio.sleep(self._heartbeat)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_entries(self) -> None:
        generation, reader = 0, self._bus.reader
        while not self._stopping:
            try:
                if generation != reader.generation or not reader.connected.is_set():
                    await reader.connected.wait()
                    generation = reader.generation
                    await self._recover()
                elif self._claims.reclaimable:
                    await self._reclaim()
                free = await self._wait_until_free()
                if not self._stopping and not self._claims.reclaimable and generation == reader.generation:
                    await self._read(free)
            except ConnectionLost:
                continue
            except (TransientError, ReplyError) as exc:
                if not isinstance(exc, ReplyError) or exc.code not in ("NOGROUP", "WRONGTYPE"):
                    log.error("bus.read_failed", error=str(exc))
                    await asyncio.sleep(self._heartbeat)
                await self._create_groups()

    async def _wait_until_free(self) -> int:
        """Wait until this replica may read; return the number of free slots."""
        while ((free := self.slots.free()) <= 0 or not self._order) and not self._stopping:
            self.slots.changed.clear()
            await self.slots.changed.wait()
        return free

    async def _read(self, free: int) -> None:
        """Read new entries into the free slots, and block until there are some."""
        limits = {one: self.slots.free_of(one) for one in self._order if one not in self._claims.not_streams}
        streams = [stream for stream, limit in limits.items() if limit != 0]
        if not streams:
            await asyncio.sleep(_SHORT_BLOCK_S)
            return
        # A read that blocks on some streams delays the others. With fewer slots than streams, read them in turn
        # without blocking; only when all are empty, block on all of them.
        for start in range(0, len(streams), free) if free < len(streams) else ():
            self._order.rotate(-free)
            if await self._read_batch(streams[start : start + free], 1, None):
                return
        block = self._bus.block if len(streams) == len(limits) else _SHORT_BLOCK_S
        # XREADGROUP has one COUNT for all streams.
        count = min([max(1, free // len(streams)), *filter(None, limits.values())])
        await self._read_batch(streams, count, block)

    async def _read_batch(self, streams: Sequence[str], count: int, block: float | None) -> bool:
        """Start at most `count` new entries of each stream; return whether there were any. block: seconds; None: do not
        block."""
        blocking = () if block is None else ("BLOCK", int(block * 1000))
        # Reserve free slots only: a larger reservation would make resuming entries wait for this read.
        self.slots.reserved_for_read = max(0, min(count * len(streams), self.slots.free()))
        try:
            reply = await self._bus.reader.call(
                *("XREADGROUP", "GROUP", self._group, self._replica, "COUNT", count, *blocking),
                *("STREAMS", *streams, *[">"] * len(streams)),
                retry=False,
                block=block or 0.0,
            )
        finally:
            self.slots.reserved_for_read = 0
            self.slots.changed.set()
        found = [
            Delivery(name.decode(), entry_id, fields, 1, self.slots)
            for name, items in reply or ()
            for entry_id, fields in entries(items)
        ]
        self._start(found)
        # The handlers begin before the next read is sent.
        await asyncio.sleep(0)
        return bool(found)

    async def _recover(self) -> None:
        """Start the entries whose reply got lost with the last connection."""
        for stream in self._routes.keys() - self._claims.not_streams:
            self._start(await self._claims.lost_in_flight(stream, self.slots))

    async def _reclaim(self) -> None:
        """Start reclaimed entries, as far as slots are free. A later heartbeat finds the others."""
        reclaimable, self._claims.reclaimable = self._claims.reclaimable, set()
        for stream in reclaimable:
            limit, free = self.slots.free_of(stream), self.slots.free()
            # Beside an entry at its last attempt, only entries to give up are claimed. They need no slot.
            count = 1 if self.slots.has_final_attempt else free if limit is None else min(limit, free)
            if count > 0:
                found = await self._claims.reclaim(stream, count, self.slots)
                for one in found:
                    log.info("bus.claimed", stream=stream, entry_id=one.entry_id, deliveries=one.deliveries)
                self._start(found)
                if len(found) == count:
                    # There may be more.
                    self._claims.reclaimable.add(stream)

    def _start(self, found: Iterable[Delivery]) -> None:
        for delivery in found if not self._stopping else ():
            if self.slots.add(delivery):
                delivery.task = self._tasks.create_task(self._deliver(delivery))

    async def _end_read(self) -> bool:
        """End the blocking read; return False if none waits in Redis."""
        with contextlib.suppress(TransientError, ReplyError):
            return await self._bus.unblock_reader()
        return False

    # ── one delivery ─────────────────────────────────────────────────────────────────────────────────────────

    async def _deliver(self, delivery: Delivery) -> None:
        """Settle one entry. After a failure it stays pending: a replica reclaims it after the visibility timeout."""
        try:
            await self._settle(delivery)
        except Fenced:
            log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
        except TransientError as exc:
            log.warning("bus.try_again", entry_id=delivery.entry_id, reason=str(exc), attempt=delivery.deliveries)
        except Exception:
            # A bug in a handler must not stop the participant.
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        else:
            self.handled += 1
        finally:
            self.slots.remove(delivery)

    async def _settle(self, delivery: Delivery) -> None:
        """Run the handler and commit its effects with the acknowledgement; or commit the entry's dead letter."""
        effects: Sequence[Command] | None = None
        dead_letter: Command | None = None
        broken_connections = 0
        if delivery.deliveries <= self._max_deliveries:
            await delivery.acquire_slot()
        while True:
            try:
                # First: the entry may have been read before a pause of this process, or the handler took long.
                certain_until = await self._verify_claim(delivery)
                if effects is None:
                    effects = await self._handle(delivery)
                    continue
                return await self._commit(delivery, effects, certain_until)
            except BusFull as exc:
                # No delivery is used up and the effects are kept: a full Redis is not the entry's fault.
                log.warning("bus.full", stream=delivery.stream, entry_id=delivery.entry_id, reason=str(exc))
                await asyncio.sleep(self._heartbeat)
                continue
            except ConnectionLost as exc:
                broken_connections += exc.broken
                if broken_connections < MAX_ATTEMPTS:
                    continue
                reason, run_hook = f"its effects broke the connection to Redis {broken_connections} times", True
            except PermanentError as exc:
                reason, run_hook = str(exc), not isinstance(exc, _PartlyWritten)
            if dead_letter is None:
                log.error("bus.dead_letter", stream=delivery.stream, entry_id=delivery.entry_id, reason=reason)
                dead_letter = dead_letter_command(self._bus, self._group, delivery, reason)
                effects = [*(await self._hook_effects(delivery, reason) if run_hook else ()), dead_letter]
            elif effects != [dead_letter]:
                log.error("bus.dead_letter_hook_refused", entry_id=delivery.entry_id, error=reason)
                effects = [dead_letter]
            else:
                raise TransientError(f"its dead letter was refused: {reason}")

    async def _handle(self, delivery: Delivery) -> Sequence[Command]:
        """Return the handler's effects. Raises PermanentError when the entry was delivered too often."""
        if delivery.deliveries > self._max_deliveries:
            raise PermanentError(f"gave up after {delivery.deliveries - 1} deliveries")
        last = delivery.deliveries == self._max_deliveries
        try:
            return await self._routes[delivery.stream].handler(delivery)
        except (ReplyError, ConnectionLost) as exc:
            if not last:
                raise TransientError(f"Redis refused a command: {exc}") from exc
            raise PermanentError(f"gave up after {delivery.deliveries} deliveries: {exc}") from exc
        except Local2Error:
            raise
        except Exception as exc:
            if not last:
                raise
            log.exception("bus.handler_failed", stream=delivery.stream, entry_id=delivery.entry_id)
            raise PermanentError(f"gave up after {delivery.deliveries} deliveries: {exc}") from exc

    async def _verify_claim(self, delivery: Delivery) -> float:
        """Return the event loop's time until which the claim is certain. Raises Fenced and BusFull."""
        now = asyncio.get_running_loop().time()
        if now >= self._claims.certain_until:
            # One renewal for all waiting entries: one for each would take longer than the claims are certain.
            async with self._verifying:
                if self._claims.renewed <= now:
                    await self._renew()
        if delivery.lost:
            raise Fenced(f"{delivery.entry_id} was taken over")
        return self._claims.certain_until

    async def _commit(self, delivery: Delivery, effects: Sequence[Command], certain_until: float) -> None:
        """Write effects and acknowledgement in one transaction, before the claim may be lost.

        A transaction, because a refused effect must refuse the acknowledgement too: Redis may become full between two
        commands of one write.
        """
        commands = [*effects]
        if any(command[0] == "EVALSHA" for command in effects):
            # A full Redis refuses the writes of a script one by one, not the transaction. It refuses this command,
            # which never writes anything, and the transaction with it.
            commands.append(("SET", nothing_key(delivery.stream), "", "XX"))
        commands.append(("XACK", delivery.stream, self._group, delivery.entry_id))
        delivery.committing = True
        try:
            replies = await self._bus.link.commit(commands, until=certain_until)
            if refused := [reply for reply in replies[: len(effects)] if isinstance(reply, ReplyError)]:
                # The other effects hold, and so does the acknowledgement. The entry is made pending again, as one
                # that was delivered too often: if this process dies, another replica writes the dead letter.
                claim = ("XCLAIM", delivery.stream, self._group, self._replica, 0, delivery.entry_id)
                await self._bus.link.pipe_raw([(*claim, "RETRYCOUNT", self._max_deliveries + 1, "FORCE", "JUSTID")])
                raise _PartlyWritten(f"one of its effects was refused: {refused[0]}")
        except ReplyError as exc:
            raise PermanentError(f"its effects were refused: {exc}") from exc
        finally:
            delivery.committing = False

    async def _hook_effects(self, delivery: Delivery, reason: str) -> Sequence[Command]:
        """Return the effects of the route's hook; none if it fails."""
        hook = self._routes[delivery.stream].on_dead_letter
        try:
            return await hook(delivery, reason) if hook is not None else ()
        except PermanentError as exc:
            log.info("bus.dead_letter_hook_skipped", reason=str(exc))
        except (Fenced, TransientError):
            raise
        except Exception:
            log.exception("bus.dead_letter_hook_failed", stream=delivery.stream, entry_id=delivery.entry_id)
        return ()

    # ── heartbeat and leaving ────────────────────────────────────────────────────────────────────────────────

    async def _renew(self) -> None:
        """Renew all claims, and cancel the handlers of entries that were taken over."""
        for delivery in await self._claims.renew(self.slots):
            if delivery.task is not None and delivery.task is not asyncio.current_task():
                log.warning("bus.claim_lost", stream=delivery.stream, entry_id=delivery.entry_id)
                delivery.task.cancel()

    async def _renew_claims(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                await self._renew()
                if over_limit := self.slots.over_limit():
                    # Not for long: claims must be renewed.
                    ended = await _cancel(over_limit, self._heartbeat / 2)
                    await self._claims.release(ended)
            except (TransientError, ReplyError) as exc:
                log.warning("bus.heartbeat_failed", reason=str(exc))
            if self._claims.reclaimable and self.slots.reserved_for_read and not self._stopping:
                # The reading task reclaims entries: it counts the free slots.
                await self._end_read()

    async def _leave(self) -> None:
        """Finish within `drain` seconds, release the other entries, and remove this consumer from its groups."""
        await _cancel(self.slots.suspended())
        await _ended(self.slots.held.values(), self._drain)
        await _cancel(self.slots.held.values())
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._claims.release_all()
        except (TimeoutError, TransientError) as exc:
            # Other replicas reclaim the entries after the visibility timeout.
            log.warning("bus.release_failed", reason=str(exc))


def _limits(routes: Mapping[str, Route]) -> dict[str, Limit]:
    return {stream: route.limit for stream, route in routes.items()}


async def _cancel(deliveries: Iterable[Delivery], timeout: float | None = None) -> list[Delivery]:
    """Cancel the handlers of entries; wait for them, and return the entries whose handlers have ended."""
    deliveries = list(deliveries)
    for delivery in deliveries:
        if delivery.task is not None:
            delivery.task.cancel()
    return await _ended(deliveries, timeout)


async def _ended(deliveries: Iterable[Delivery], timeout: float | None = None) -> list[Delivery]:
    """Wait until the handlers of entries have ended, at most `timeout` seconds; return those that have."""
    tasks = {delivery.task: delivery for delivery in deliveries if delivery.task is not None}
    done, _ = await asyncio.wait(tasks, timeout=timeout) if tasks else (set(), None)
    return [tasks[task] for task in done]
