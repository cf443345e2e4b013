"""Odd content: keys of another type, vanished groups and entries, extreme ids, fields and sizes stop no consumer."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from contract.bus.observing import EFFECTS, Recorder, add, eventually, pending, read_as, streams_of
from contract.bus.servers import Server, network
from contract.bus.surface import STREAM, Delivery, consuming, dead_letters, fields_of, route

LARGEST = 2**64 - 1


async def test_key_of_wrong_type_stops_no_other_stream(server: Server, client: redis.Redis) -> None:
    wrong, right = streams_of(2)
    gated, seen = Recorder(gated=True), Recorder()
    client.set(wrong, "x")
    async with consuming(server, {wrong: route(seen), right: route(gated)}, visibility_timeout=0.3):
        (held,) = add(client, 1, right)
        await eventually(lambda: gated.seen == [held])

        def renewed() -> bool:
            (row,) = client.xpending_range(right, "workers", "-", "+", 1)
            return bool(row["time_since_delivered"] < before)

        (row,) = client.xpending_range(right, "workers", "-", "+", 1)
        before = row["time_since_delivered"] + 1
        await eventually(renewed)
        gated.gate.set()
        await eventually(lambda: pending(client, right) == 0)
        client.delete(wrong)
        back = add(client, 1, wrong)
        await eventually(lambda: seen.seen == back)
        # and while the stream is read
        client.set(wrong, "x")
        more = add(client, 3, right)
        await eventually(lambda: gated.seen == [held, *more])
    assert client.get(wrong) == "x"


async def test_group_is_made_again_after_a_flush(server: Server, client: redis.Redis) -> None:
    first, second = Recorder(), Recorder()
    async with consuming(server, first, name="r1"), consuming(server, second, name="r2"):
        for turn in range(3):
            add(client)
            await eventually(lambda: len(first.seen) + len(second.seen) == 2 * turn + 1)  # noqa: B023
            await eventually(lambda: pending(client) == 0)
            server.flush()
            add(client)
            await eventually(lambda: len(first.seen) + len(second.seen) == 2 * turn + 2)  # noqa: B023
            await eventually(lambda: pending(client) == 0)


async def test_flush_during_work_stops_no_consumer(server: Server, client: redis.Redis) -> None:
    slow = Recorder(0.3)
    async with consuming(server, slow, visibility_timeout=0.3):
        add(client)
        await eventually(lambda: slow.running == 1)
        server.flush()
        await eventually(lambda: slow.running == 0)
        (later,) = add(client)
        await eventually(lambda: later in slow.seen and pending(client) == 0)


async def test_deleted_group_is_made_again(server: Server, client: redis.Redis) -> None:
    recorder = Recorder()
    async with consuming(server, recorder, visibility_timeout=0.3):
        add(client)
        await eventually(lambda: recorder.seen and pending(client) == 0)
        client.xgroup_destroy(STREAM, "workers")
        (later,) = add(client)
        await eventually(lambda: later in recorder.seen and pending(client) == 0)


async def test_entry_deleted_during_its_work_is_finished(server: Server, client: redis.Redis) -> None:
    gated = Recorder(gated=True)

    async def handle(delivery: Delivery) -> list[Any]:
        await gated(delivery)
        return [("RPUSH", EFFECTS, delivery.entry_id)]

    async with consuming(server, handle):
        (gone,) = add(client)
        await eventually(lambda: gated.running == 1)
        client.xdel(STREAM, gone)
        gated.gate.set()
        (later,) = add(client)
        await eventually(lambda: later in client.lrange(EFFECTS, 0, -1) and pending(client) == 0)
    assert dead_letters(client) == []


async def test_deleted_entry_of_dead_consumer_is_skipped(server: Server, client: redis.Redis) -> None:
    ids = read_as(client, "dead", 3)
    client.xdel(STREAM, ids[1])
    recorder = Recorder()
    async with consuming(server, recorder, visibility_timeout=0.3):
        await eventually(lambda: sorted(recorder.seen) == [ids[0], ids[2]] and pending(client) == 0)
    assert dead_letters(client) == []


async def test_entry_with_the_largest_id_is_handled(server: Server, client: redis.Redis) -> None:
    """A stream accepts no entry after it; the other streams go on."""
    full, other = streams_of(2)
    recorder = Recorder()
    async with consuming(server, {full: route(recorder), other: route(recorder)}, visibility_timeout=0.3):
        ids = add(client, 1, full)
        ids += [client.xadd(full, {"payload": "x"}, id=f"{LARGEST}-{last}") for last in (LARGEST - 1, LARGEST)]
        ids += add(client, 1, other)
        await eventually(lambda: sorted(recorder.seen) == sorted(ids))
        await eventually(lambda: pending(client, full) == pending(client, other) == 0)


async def test_entry_with_an_id_of_the_future_is_handled(server: Server, client: redis.Redis) -> None:
    """As after the server's clock was set back."""
    seconds, _ = client.time(target_nodes="random") if server.clustered else client.time()
    recorder = Recorder()
    async with consuming(server, recorder):
        ids = [client.xadd(STREAM, {"payload": "x"}, id=f"{(seconds + 36_000) * 1000}-{n}") for n in range(2)]
        ids += add(client, 2)
        await eventually(lambda: recorder.seen == ids and pending(client) == 0)


ODD: dict[str, list[bytes]] = {
    "text": [b"payload", b"\xc3\xa9 \xe2\x80\xa8 \\x00 \r\n"],
    "binary": [bytes(range(256)), bytes(reversed(range(256)))],
    "empty": [b"", b""],
    "repeated": [b"a", b"1", b"a", b"2"],
    "protocol": [b"$-1\r\n", b"*1\r\n$4\r\nQUIT\r\n"],
    "many": [b"f", b"v"] * 5_000,
    "large": [b"payload", b"x" * 8_000_000],
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
async def test_fields_arrive_unchanged(server: Server, client: redis.Redis, fields: list[bytes]) -> None:
    seen: list[list[bytes]] = []

    async def handle(delivery: Delivery) -> list[Any]:
        seen.append(fields_of(delivery))
        return [("SET", EFFECTS, b"".join(delivery.fields))]

    async with consuming(server, handle):
        client.execute_command("XADD", STREAM, "*", *fields)
        await eventually(lambda: seen and pending(client) == 0)
    assert seen == [fields]
    assert client.strlen(EFFECTS) == len(b"".join(fields))


async def test_large_message_on_slow_line_keeps_other_claims(server: Server, client: redis.Redis) -> None:
    """Neither the read nor the effects are silence, and renewals do not wait behind them."""
    timeout = 1.2
    gated = Recorder(gated=True)

    async def handle(delivery: Delivery) -> list[Any]:
        if fields_of(delivery)[0] == b"large":
            return [("RPUSH", EFFECTS, *delivery.fields)]
        return await gated(delivery)

    async with network(server) as net, consuming(net, handle, timeout=0.5, visibility_timeout=timeout):
        (held,) = add(client)
        await eventually(lambda: gated.running == 1)
        net.set(rate=3_000_000)
        client.xadd(STREAM, {"large": "x" * 4_500_000})
        idle: list[float] = []

        def written() -> bool:
            rows = client.xpending_range(STREAM, "workers", held, held, 1)
            idle.append(rows[0]["time_since_delivered"] / 1000)
            return bool(client.llen(EFFECTS))

        await eventually(written)
        assert max(idle) < timeout
        net.set()
        gated.gate.set()
        await eventually(lambda: pending(client) == 0)


async def test_many_waiting_entries_are_all_handled(server: Server, client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for _ in range(2_000):
            pipe.xadd(STREAM, {"payload": "x"})
        ids = pipe.execute()
    recorder = Recorder()
    async with consuming(server, recorder, concurrency=64):
        await eventually(lambda: len(recorder.seen) == len(ids) and pending(client) == 0)
    assert sorted(recorder.seen) == sorted(ids)
