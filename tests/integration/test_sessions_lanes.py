"""The lane of a session: its queries run one at a time, in the order accepted, whoever reads them."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis

from shared.bus import Bus, order
from shared.contracts import QUERY_RECEIVED
from shared.records.sessions import Sessions

LANE = "local2:session:{s}:lane:A"


async def publish(bus: Bus) -> str:
    reply = await bus.link.call("XADD", QUERY_RECEIVED.stream, "*", "payload", "{}")
    return str(reply.decode())


async def accept(bus: Bus, sessions: Sessions) -> str:
    ticket = await sessions.reserve("s", ["A"], 100)
    assert ticket is not None
    query_id = await publish(bus)
    await sessions.confirm("s", ["A"], ticket, query_id)
    return query_id


@pytest.mark.parametrize("seed", range(200))
async def test_no_interleaving_grants_two_at_once_or_out_of_order(seed: int, redis_url: str, bus: Bus) -> None:
    rng = random.Random(seed)
    replicas = [Sessions(bus), Sessions(bus)]
    count = rng.randint(2, 6)
    granted: list[str] = []
    running: set[str] = set()

    async def pause() -> None:
        for _ in range(rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(rng.choice((0, 0, 0.001)))

    async def gateway() -> None:
        await pause()
        ticket = await replicas[0].reserve("s", ["A"], 100)
        assert ticket is not None
        await pause()
        query_id = await publish(bus)
        readers.append(asyncio.create_task(reader(query_id, ticket)))
        if rng.random() < 0.7:  # else the gateway died after it published
            await pause()
            await rng.choice(replicas).confirm("s", ["A"], ticket, query_id)

    async def reader(query_id: str, ticket: str) -> None:
        await pause()
        while True:
            sessions = rng.choice(replicas)
            if await sessions.turn("s", "A", query_id, ticket, "inbox") is None:
                break
            await pause()
            await asyncio.sleep(0)
        assert not running, "two at once"
        running.add(query_id)
        granted.append(query_id)
        await pause()
        # a second replica that took the query over asks again, and still has the turn
        assert await replicas[1].turn("s", "A", query_id, ticket, "inbox") is None
        running.discard(query_id)
        await sessions.release("s", "A", query_id)

    readers: list[asyncio.Task[None]] = []
    async with asyncio.timeout(5):
        await asyncio.gather(*(gateway() for _ in range(count)))
        await asyncio.gather(*readers)
    assert granted == sorted(granted, key=order)
    assert len(granted) == count
    assert await bus.link.call("ZCARD", LANE) == 0


async def test_a_later_query_waits_for_one_that_is_accepted_but_not_yet_published(bus: Bus) -> None:
    sessions = Sessions(bus)
    early = await sessions.reserve("s", ["A"], 10)
    assert early is not None
    first, late = await publish(bus), await publish(bus)
    assert await sessions.turn("s", "A", late, None, "inbox") == ""
    await sessions.confirm("s", ["A"], early, first)
    assert await sessions.turn("s", "A", late, None, "inbox") == first
    assert await sessions.turn("s", "A", first, early, "inbox") is None


async def test_a_ticket_drawn_later_does_not_hold_up_an_earlier_query(bus: Bus) -> None:
    sessions = Sessions(bus)
    query_id = await accept(bus, sessions)
    await asyncio.sleep(0.005)
    assert await sessions.reserve("s", ["A"], 10) is not None
    assert await sessions.turn("s", "A", query_id, None, "inbox") is None


async def test_the_ticket_of_a_gateway_that_died_expires(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.records.sessions.TICKET_MS", 150)
    sessions = Sessions(bus)
    assert await sessions.reserve("s", ["A"], 10) is not None
    query_id = await publish(bus)
    assert await sessions.turn("s", "A", query_id, None, "inbox") == ""
    async with asyncio.timeout(1):
        while await sessions.turn("s", "A", query_id, None, "inbox") is not None:
            await asyncio.sleep(0.01)


async def test_a_confirmation_that_comes_after_the_answer_blocks_nobody(bus: Bus) -> None:
    sessions = Sessions(bus)
    ticket = await sessions.reserve("s", ["A"], 10)
    assert ticket is not None
    query_id = await publish(bus)
    assert await sessions.turn("s", "A", query_id, ticket, "inbox") is None
    await sessions.release("s", "A", query_id)
    await sessions.confirm("s", ["A"], ticket, query_id)
    following = await accept(bus, sessions)
    assert await sessions.turn("s", "A", following, None, "inbox") is None


async def test_the_limit_counts_accepted_and_reserved_queries_and_a_refusal_leaves_nothing(bus: Bus) -> None:
    sessions = Sessions(bus)
    await accept(bus, sessions)
    assert await sessions.reserve("s", ["A", "B"], 2) is not None
    assert await sessions.reserve("s", ["A", "B"], 2) is None
    assert await bus.link.call("ZCARD", LANE) == 2
    assert await bus.link.call("ZCARD", "local2:session:{s}:lane:B") == 1


async def test_leaving_wakes_the_next_and_creates_no_inbox_for_the_dead(bus: Bus, raw: redis.Redis) -> None:
    sessions = Sessions(bus)
    first, second, third = [await accept(bus, sessions) for _ in range(3)]
    assert await sessions.turn("s", "A", first, None, "inbox-1") is None
    assert await sessions.turn("s", "A", second, None, "inbox-2") == first
    assert await sessions.turn("s", "A", third, None, "inbox-3") == first
    raw.xadd("inbox-2", {"type": "started"})
    await sessions.release("s", "A", first)
    assert raw.xrange("inbox-2")[-1][1] == {b"type": b"wake", b"session": b"s", b"respondent": b"A"}
    await sessions.release("s", "A", second)
    assert not raw.exists("inbox-3")
    assert await sessions.turn("s", "A", third, None, "inbox-3") is None


async def test_respondents_have_lanes_of_their_own(bus: Bus) -> None:
    sessions = Sessions(bus)
    first = await publish(bus)
    second = await publish(bus)
    assert await sessions.turn("s", "A", first, None, "i") is None
    assert await sessions.turn("s", "B", second, None, "i") is None
    assert await sessions.turn("s", "A", second, None, "i") == first
