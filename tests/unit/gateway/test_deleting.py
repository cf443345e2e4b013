"""What goes with a session, or with queries of it, what is told to whom, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from support.proxy import Proxy, once

from services.gateway.http.gateway import Gateway
from services.gateway.queries.deletion import delete_session, end_session, forget_queries, still_read
from shared.bus import Bus
from shared.bus.keys import (
    cancel_key,
    deleted_key,
    journal_key,
    lane_key,
    queries_key,
    record_key,
    session_key,
    summary_key,
)
from shared.contracts import (
    ANSWER_DIALOG,
    DEAD_LETTER,
    MEMORY_FORGET,
    QUERY_CANCEL,
    QUERY_FORGET,
    QUERY_RECEIVED,
    MemoryForget,
    QueryForget,
    Subject,
)
from shared.envelope import Envelope
from shared.records import lanes
from shared.records.lanes import padded
from shared.records.sessions import SessionInfo, Turn

# Long after each other: what is looked for since a query is not found since the next.
OLD, NEXT, NEW = "900000-0", "2000000-0", "3000000-0"


async def told(bus: Bus, subject: Subject[Any]) -> list[tuple[Envelope, Any]]:
    found = [Envelope.parse(subject.name, *entry) for entry in await bus.range(subject.stream)]
    return [(envelope, subject.decode(envelope)) for envelope in found]


async def clock(bus: Bus) -> int:
    """Redis' own, in ms."""
    seconds, micros = await bus.link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


async def opened(gateway: Gateway, session: str = "s") -> SessionInfo:
    await gateway.sessions.open(session, "ann", "title")
    info = await gateway.sessions.info(session)
    assert info is not None
    return info


async def asked(gateway: Gateway, *query_ids: str, session: str = "s", read: bool = False, listed: bool = True) -> None:
    """Queries of a session with their records and journals; `read`: nobody has them on the bus any more."""
    bus = gateway.bus
    for query_id in query_ids:
        await bus.link.pipe(
            [
                ("HSET", record_key(query_id), "session_id", session),
                ("XADD", journal_key(query_id, "A"), "1-1", "type", "claimed"),
                *([("ZADD", queries_key(session), 9e12, query_id)] if listed else []),
                *([] if read else [("XADD", QUERY_RECEIVED.stream, query_id, "session_id", session)]),
                *([] if read else [("ZADD", lane_key("A", session), 0, padded(query_id))]),
            ]
        )


async def left(gateway: Gateway, *query_ids: str) -> list[str]:
    """Of which queries something is kept under their ids."""
    keys = [("EXISTS", record_key(one), journal_key(one, "A")) for one in query_ids]
    return [one for one, count in zip(query_ids, await gateway.bus.link.pipe(keys), strict=True) if count]


async def said_of(gateway: Gateway, field: str, values: Sequence[str], at: str) -> None:
    """An answer that was published, and a letter that was set aside, of each."""
    ms, _, _ = at.partition("-")
    for number, value in enumerate(values, 1):
        letter = orjson.dumps({"fields": {field: value}})
        await gateway.bus.link.pipe(
            [
                ("XADD", ANSWER_DIALOG.stream, f"{ms}-{number}", field, value, "payload", "{}"),
                ("XADD", DEAD_LETTER.stream, f"{ms}-{number}", "payload", letter),
            ]
        )


async def still_said(gateway: Gateway, field: str) -> tuple[list[str], list[str]]:
    answers = await gateway.bus.range(ANSWER_DIALOG.stream)
    letters = await gateway.bus.range(DEAD_LETTER.stream)
    return (
        [dict(zip(words[::2], words[1::2], strict=True))[field.encode()].decode() for _, words in answers],
        [orjson.loads(words[-1])["fields"][field] for _, words in letters],
    )


async def test_the_end_of_a_session_is_told_and_nothing_of_it_is_left(gateway: Gateway) -> None:
    bus = gateway.bus
    info, other = await opened(gateway), await opened(gateway, "t")
    await asked(gateway, OLD, read=True)
    await said_of(gateway, "session_id", ["s", "t", "s"], OLD)
    await asked(gateway, NEXT, "2000000-1")
    await asked(gateway, NEW, session="t")
    # whoever answers the first of them goes on from there
    await bus.link.call("XGROUP", "CREATE", QUERY_RECEIVED.stream, "generator", "0")
    await bus.link.call("XREADGROUP", "GROUP", "generator", "c", "COUNT", 1, "STREAMS", QUERY_RECEIVED.stream, ">")
    for one in (OLD, NEXT):
        await bus.link.call("SET", cancel_key(one), "0")
    earliest = await clock(bus)
    assert await end_session(gateway, info) == [NEXT, "2000000-1"]
    ((envelope, ended),) = await told(bus, MEMORY_FORGET)
    assert ended == MemoryForget(user_id="ann", session_id="s", at=ended.at)
    assert earliest <= ended.at <= await clock(bus)
    assert (envelope.user_id, envelope.session_id) == ("ann", "s")
    # who is at work on the open ones is told, now and when he comes back; of what has ended nothing stays
    assert {(one.correlation_id, cancel.query_id) for one, cancel in await told(bus, QUERY_CANCEL)} == {
        (one, one) for one in (NEXT, "2000000-1")
    }
    assert [await bus.link.call("EXISTS", cancel_key(one)) for one in (OLD, NEXT, "2000000-1")] == [0, 1, 1]
    assert 600_000 < await bus.link.call("TTL", cancel_key(NEXT)) <= 604_800
    assert await gateway.sessions.info("s") is None
    assert await gateway.sessions.deleted("s", "2000000-1")
    assert await left(gateway, OLD, NEXT, "2000000-1") == []
    assert await bus.link.call("EXISTS", *lanes.lane_keys("s")) == 0
    assert await still_said(gateway, "session_id") == (["t"], ["t"])
    # and all of another one
    assert await gateway.sessions.info("t") == other
    assert await left(gateway, NEW) == [NEW]
    assert await lanes.unfinished(bus, "t", "A") == [NEW]


async def test_whatever_names_a_query_of_the_session_it_is_stopped_and_erased(gateway: Gateway) -> None:
    bus, info = gateway.bus, await opened(gateway)
    queries = [f"{n}-0" for n in range(7, 14)]
    await asked(gateway, *queries, read=True, listed=False)
    await bus.link.pipe(
        [
            ("ZADD", queries_key("s"), 9e12, queries[0], 9e12, queries[5], 9e12, queries[6]),
            ("ZADD", lane_key("A", "s"), 0, padded(queries[1])),
            ("ZADD", lane_key("B", "s"), 0, padded(queries[2])),
            *gateway.sessions.appending("s", "A", Turn(queries[3], "q", "a", 1)),
            *gateway.sessions.appending("s", "B", Turn(queries[4], "q", "a", 1)),
        ]
    )
    assert await delete_session(gateway, info) == [queries[1]]
    assert await left(gateway, *queries) == []


async def test_deletion_removes_queries_accepted_meanwhile(
    gateway: Gateway, gateway_behind_proxy: Gateway, proxy: Proxy
) -> None:
    info = await opened(gateway)
    await asked(gateway, OLD, read=True)

    async def accept() -> None:
        await asked(gateway, NEXT)
        await said_of(gateway, "session_id", ["s", "t"], NEXT)

    # the deletion has found the session's queries by then
    proxy.before = once(summary_key("s").encode(), accept)
    await delete_session(gateway_behind_proxy, info)
    assert await left(gateway, OLD, NEXT) == []
    assert await still_said(gateway, "session_id") == (["t"], ["t"])
    assert await gateway.bus.link.call("EXISTS", *lanes.lane_keys("s")) == 0


async def test_deletion_closes_the_session_before_it_erases(
    gateway: Gateway, gateway_behind_proxy: Gateway, proxy: Proxy
) -> None:
    """A respondent that writes from then on finds its query deleted."""
    info = await opened(gateway)
    await asked(gateway, NEXT, read=True)
    closed: list[bool] = []

    async def look() -> None:
        closed.append(await gateway.sessions.deleted("s", NEXT))

    await gateway.bus.link.call("XADD", QUERY_RECEIVED.stream, NEW, "session_id", "t")
    proxy.before = once(journal_key(NEXT, "A").encode(), look)
    await delete_session(gateway_behind_proxy, info)
    assert closed == [True]


@pytest.mark.parametrize(
    "command",
    [
        deleted_key("s"),
        journal_key(OLD, "A"),
        ANSWER_DIALOG.stream,
        DEAD_LETTER.stream,
        summary_key("s"),
        lane_key("A", "s"),
    ],
)
async def test_deletion_interrupted_before_any_command_can_be_repeated(
    gateway: Gateway, gateway_behind_proxy: Gateway, proxy: Proxy, command: str
) -> None:
    info = await opened(gateway)
    await asked(gateway, OLD, read=True)
    await gateway.bus.link.call("ZADD", lane_key("A", "s"), 0, padded(OLD))
    await said_of(gateway, "session_id", ["s", "t"], OLD)
    await asked(gateway, NEW, session="t")
    reached = asyncio.Event()

    async def stall() -> None:
        reached.set()
        await asyncio.Event().wait()

    proxy.before = once(command.encode(), stall)
    deleting = asyncio.create_task(delete_session(gateway_behind_proxy, info))
    async with asyncio.timeout(60):
        await reached.wait()
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    # a user finds it to delete it again
    assert await gateway.sessions.info("s") == info
    await delete_session(gateway, info)
    assert await gateway.sessions.info("s") is None
    assert await left(gateway, OLD) == []
    assert await still_said(gateway, "session_id") == (["t"], ["t"])
    assert await gateway.bus.link.call("EXISTS", *lanes.lane_keys("s")) == 0


async def test_a_session_without_queries_is_deleted(gateway: Gateway) -> None:
    info = await opened(gateway)
    await said_of(gateway, "session_id", ["s", "t"], OLD)
    assert await delete_session(gateway, info) == []
    assert await gateway.sessions.info("s") is None
    assert (await still_said(gateway, "session_id"))[1] == ["t"]


@pytest.mark.parametrize(
    ("at_work", "on_the_bus"), [(False, True), (True, False), (True, True)], ids=["unread", "acknowledged", "at work"]
)
async def test_deletion_ends_without_a_respondent_that_stops(gateway: Gateway, at_work: bool, on_the_bus: bool) -> None:
    info = await opened(gateway)
    await asked(gateway, NEXT)
    if at_work:
        await lanes.turn(gateway.bus, "s", "A", NEXT, "inbox")
    if not on_the_bus:
        await gateway.bus.link.call("XDEL", QUERY_RECEIVED.stream, NEXT)
    async with asyncio.timeout(60):
        assert await delete_session(gateway, info) == [NEXT]
    assert await gateway.bus.link.call("EXISTS", session_key("s"), *lanes.lane_keys("s")) == 0


async def test_queries_are_forgotten_page_by_page_and_their_turns_stay(gateway: Gateway) -> None:
    bus = gateway.bus
    await opened(gateway)
    late = "10000000-0"
    await asked(gateway, OLD, read=True)
    await said_of(gateway, "correlation_id", [OLD, NEXT, late], OLD)
    await asked(gateway, NEXT, NEW, late)
    await bus.link.pipe(gateway.sessions.appending("s", "A", Turn(OLD, "q", "a", 1)))
    earliest = bus.now_ms()
    # two hundred ids are one message
    many = [f"4000000-{n}" for n in range(198)]
    await forget_queries(gateway, "ann", "s", [late, OLD, *many, NEW])
    found = await told(bus, QUERY_FORGET)
    # in their order, which is not that of their letters
    assert [gone for _, gone in found] == [
        QueryForget(user_id="ann", session_id="s", queries=queries, at=gone.at)
        for (_, gone), queries in zip(found, ([OLD, NEW, *many], [late]), strict=True)
    ]
    assert all(earliest <= gone.at <= bus.now_ms() for _, gone in found)
    assert [(one.user_id, one.session_id) for one, _ in found] == [("ann", "s")] * 2
    cancelled = [await bus.link.call("EXISTS", cancel_key(one)) for one in (OLD, NEXT, NEW, late)]
    # nothing comes of them any more, also of an answer that somebody has still to grade
    gone_by_now = [await gateway.sessions.deleted("s", one) for one in (OLD, NEXT, NEW, late)]
    assert cancelled == gone_by_now == [True, False, True, True]
    assert await left(gateway, OLD, NEXT, NEW, late) == [NEXT]
    assert await bus.link.call("ZRANGE", queries_key("s"), 0, -1) == [NEXT.encode()]
    assert await still_said(gateway, "correlation_id") == ([NEXT], [NEXT])
    assert [turn.query_id for turn in await gateway.sessions.every_turn("s")] == [OLD]


async def test_query_is_read_until_every_group_has_finished_it(gateway: Gateway) -> None:
    bus, stream = gateway.bus, QUERY_RECEIVED.stream
    queries = ["1-0", "2-0", "9-0", "10-0"]
    await asked(gateway, *queries)
    await bus.link.call("XGROUP", "CREATE", stream, "generator", "0")
    await bus.link.call("XREADGROUP", "GROUP", "generator", "c", "COUNT", 3, "STREAMS", stream, ">")
    await bus.link.call("XACK", stream, "generator", "1-0", "9-0")
    # the others were never there; of these the first is finished, and no unfinished entry precedes it
    absent = [f"5-{n}" for n in range(200)]
    assert await still_read(bus, ["1-0", "2-0", *absent, "9-0", "10-0", "11-0"]) == ["2-0", "9-0", "10-0"]
    assert await still_read(bus, []) == []
