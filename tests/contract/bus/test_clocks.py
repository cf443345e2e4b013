"""Clock steps and pauses: a claim that looks old is not enough, and a claim of the future is taken over in time."""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import Callable

import redis
from contract.bus.observing import EFFECTS, Recorder, Worker, add, always, eventually, owners, pending, read_as
from contract.bus.servers import Server
from contract.bus.surface import GROUP, STREAM, VISIBILITY_TIMEOUT, consuming

HOUR_MS = 3_600_000


def _crc(data: bytes) -> int:
    """Return CRC-64/REDIS, with which a dumped value ends (https://reveng.sourceforge.io/crc-catalogue/17plus.htm)."""
    value = 0
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x95AC9329AC4BC9B5 if value & 1 else 0)
    return value


def shift_claims(server: Server, ms: int) -> None:
    """Make every claim look as if the server's clock had been set since, by so much (back: positive).

    No command can date a claim ahead of the clock: the stream is dumped, changed and restored.
    """
    with redis.Redis(port=server.node_of(STREAM).port) as raw:
        dumped: bytes = raw.dump(STREAM)[:-8]
        for group in raw.xinfo_stream(STREAM, full=True)["groups"]:
            for _, _, delivered, _ in group["pending"]:
                dumped = dumped.replace(struct.pack("<q", delivered), struct.pack("<q", delivered + ms))
        raw.restore(STREAM, 0, dumped + struct.pack("<Q", _crc(dumped)), replace=True)


async def test_dead_claim_of_the_future_is_taken_over(server: Server, client: redis.Redis) -> None:
    """The server's clock was set back by an hour after a consumer read its entries and died."""
    ids = read_as(client, "dead", 2)
    shift_claims(server, HOUR_MS)
    recorder = Recorder()
    async with consuming(server, recorder):
        await eventually(lambda: sorted(recorder.seen) == sorted(ids) and pending(client) == 0)
    assert recorder.deliveries == [2, 2]


async def test_live_claim_survives_a_clock_set_back(server: Server, client: redis.Redis) -> None:
    gated, other = Recorder(gated=True), Recorder()
    async with consuming(server, gated, name="owner"):
        (held,) = add(client)
        await eventually(lambda: gated.running == 1)
        async with consuming(server, other, name="other"):
            shift_claims(server, HOUR_MS)
            await always(lambda: owners(client).get(held) == "owner", 3 * VISIBILITY_TIMEOUT)
            gated.gate.set()
            await eventually(lambda: pending(client) == 0)
    assert held not in other.seen


async def test_entries_survive_a_pause_of_all_processes(
    own_server: Server, own_client: redis.Redis, worker: Callable[..., Worker]
) -> None:
    """A suspended host: on waking, all claims look old, and each owner renews its own before any is taken over."""
    replicas = [worker(own_server, f"r{n}", seconds=4 * VISIBILITY_TIMEOUT) for n in range(3)]
    ids = add(own_client, 6)
    await eventually(lambda: own_client.llen(Worker.STARTED) == 6)
    for replica in replicas:
        replica.send(signal.SIGSTOP)
    own_server.pause()
    began = time.monotonic()
    while time.monotonic() - began < 2 * VISIBILITY_TIMEOUT:
        await asyncio.sleep(0.01)
    own_server.resume()
    for replica in replicas:
        replica.send(signal.SIGCONT)
        # they wake up one after the other
        await asyncio.sleep(0.05)
    await eventually(lambda: own_client.llen(EFFECTS) == 6 and pending(own_client) == 0)
    started = own_client.lrange(Worker.STARTED, 0, -1)
    assert sorted(one.partition(":")[2] for one in started) == sorted(ids)


async def test_paused_server_makes_no_claim_stale(own_server: Server, own_client: redis.Redis) -> None:
    gated, other = Recorder(gated=True), Recorder()
    async with consuming(own_server, gated, name="owner", timeout=0.3):
        (held,) = add(own_client)
        await eventually(lambda: gated.running == 1)
        async with consuming(own_server, other, name="other", timeout=0.3):
            # the other one has watched for long enough
            await always(lambda: held not in other.seen, 2 * VISIBILITY_TIMEOUT)
            own_server.pause()
            await always(lambda: held not in other.seen, 2.5 * VISIBILITY_TIMEOUT)
            own_server.resume()
            await always(lambda: held not in other.seen, 2 * VISIBILITY_TIMEOUT)
            gated.gate.set()
            await eventually(lambda: pending(own_client) == 0)
    assert held not in other.seen


async def test_held_back_commands_make_no_claim_stale(own_server: Server, own_client: redis.Redis) -> None:
    """CLIENT PAUSE: the server runs, and answers no command for a while."""
    gated, other = Recorder(gated=True), Recorder()
    async with consuming(own_server, gated, name="owner"):
        (held,) = add(own_client)
        await eventually(lambda: gated.running == 1)
        async with consuming(own_server, other, name="other"):
            await eventually(lambda: pending(own_client) == 1)
            own_server.everywhere("CLIENT", "PAUSE", int(3_000 * VISIBILITY_TIMEOUT), "ALL")
            # answered at the end of the pause
            assert await asyncio.to_thread(owners, own_client) == {held: "owner"}
            await always(lambda: held not in other.seen, 2 * VISIBILITY_TIMEOUT)
            gated.gate.set()
            await eventually(lambda: pending(own_client) == 0)
    assert held not in other.seen


async def test_entry_of_a_dead_consumer_survives_a_pause(own_server: Server, own_client: redis.Redis) -> None:
    """After the pause it is taken over all the same, only later."""
    recorder = Recorder()
    async with consuming(own_server, recorder, timeout=0.3, visibility_timeout=0.3):
        await eventually(lambda: pending(own_client) == 0)
        own_server.pause()
        await asyncio.sleep(0.5)
        own_server.resume()
        await eventually(lambda: own_client.ping())
        entry_id = own_client.xadd(STREAM, {"payload": "x"})
        await eventually(lambda: entry_id in recorder.seen and pending(own_client) == 0)
        recorder.seen.clear()
        own_client.xclaim(STREAM, GROUP, "dead", 0, [entry_id], force=True, justid=True)
        await eventually(lambda: entry_id in recorder.seen and pending(own_client) == 0)
