"""Versions of an answer: which turn stands behind which, what leaves with one, and where a conversation ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from support.proxy import Proxy, once

from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import Gateway
from services.gateway.queries.records import QueryRecord
from services.gateway.queries.versions import branch_point, parents, replacements_of, supersede, tip_of
from shared.bus.keys import cancel_key, lane_key, queries_key, record_key, steps_key
from shared.contracts import QUERY_FORGET, QUERY_RECEIVED
from shared.envelope import Envelope
from shared.records import lanes
from shared.records.lanes import padded
from shared.records.sessions import Turn, before, shown
from shared.records.summaries import Summary


def turn(n: int, after: int | None = None) -> Turn:
    return Turn(f"{n}-0", f"q{n}", f"a{n}", n, after=None if after is None else f"{after}-5")


def numbers(turns: list[Turn]) -> list[int]:
    return [turn.time for turn in turns]


# 1 ─ 2 ─ 3          and behind 1 also 4 ─ 5, a version of 2, and 6 once more behind 2, beside 3
TREE = [turn(1), turn(2), turn(3), turn(4, after=1), turn(5), turn(6, after=2)]


def test_each_turn_knows_the_one_before_it() -> None:
    assert parents(TREE) == {"1-0": "", "2-0": "1-0", "3-0": "2-0", "4-0": "1-0", "5-0": "4-0", "6-0": "2-0"}
    # what a turn stood behind has left: the one before that takes its place
    assert parents([turn(1), turn(4, after=2)])["4-0"] == "1-0"
    assert parents([turn(3, after=2)])["3-0"] == ""


@pytest.mark.parametrize(
    ("after", "expected"),
    [(None, [1, 2, 6]), ("5-0", [1, 4, 5]), ("3-0", [1, 2, 3]), ("2-0", [1, 2]), ("0-9", []), ("4-3", [1, 4])],
)
def test_a_conversation_is_each_turn_with_the_one_before_it(after: str | None, expected: list[int]) -> None:
    assert numbers(shown(TREE, after)) == expected


def test_a_question_takes_its_versions_and_what_came_after_them_along() -> None:
    assert replacements_of(TREE, "4-0") == ["2-0", "3-0", "4-0", "5-0", "6-0"]
    assert replacements_of(TREE, "6-0") == ["3-0", "6-0"]
    assert replacements_of(TREE, "1-0") == [one.query_id for one in TREE]
    assert replacements_of(TREE, "9-0") == []


def test_the_conversation_that_was_continued_last_is_shown_of_a_version() -> None:
    assert [tip_of(TREE, f"{n}-0") for n in (1, 2, 3, 4)] == ["6-0", "6-0", "3-0", "5-0"]
    assert tip_of(TREE, "9-0") is None


def test_before_a_query_is_no_other() -> None:
    assert (before("5-3"), before("5-0"), before("0-0")) == ("5-2", "4-9999999999", "0-9999999999")


@pytest.mark.parametrize(("until", "told"), [(1, True), (2, False), (3, False), (4, True), (5, True)])
def test_a_summary_of_a_version_tells_nothing_of_another(until: int, told: bool) -> None:
    summary = Summary(f"{until}-0", 1, "What was said.")
    assert summary.tells_of(shown(TREE, "5-0")) is told
    # a question that stands behind the fourth turn, and has no turn yet
    assert summary.tells_of(shown(TREE, "4-0"), "4-0") is (until in (1, 4))


# ── on the bus ───────────────────────────────────────────────────────────────────────────────────────────────────


async def opened(gateway: Gateway, *turns: Turn) -> None:
    await gateway.sessions.open("s", "ann", "title")
    for one in turns:
        await gateway.bus.link.pipe(gateway.sessions.appending("s", "A", one))


async def unanswered(gateway: Gateway, query_id: str, **values: Any) -> None:
    failed = orjson.dumps({"query": "failed", "state": "failed", **values})
    await gateway.bus.link.call("HSET", steps_key("s"), f"{query_id} unanswered", failed)


def record(query_id: str, query: str = "q2", **values: Any) -> QueryRecord:
    return QueryRecord(query_id, **{"user_id": "ann", "session_id": "s", "query": query, "mode": "chat",
                                    "asked": "", **values})  # fmt: skip


async def recorded(gateway: Gateway, query_id: str, **values: Any) -> None:
    kept = record(query_id, **values).stored()
    await gateway.bus.link.call("HSET", record_key(query_id), *(word for pair in kept.items() for word in pair))


async def test_a_question_takes_the_place_of_a_turn_of_one_under_way_or_of_one_without_an_answer(
    gateway: Gateway,
) -> None:
    await opened(gateway, turn(2), turn(4, after=1))
    for query_id in ("2-0", "5-0"):
        await recorded(gateway, query_id, after="3-0" if query_id == "5-0" else "")
    await unanswered(gateway, "6-0")
    await unanswered(gateway, "7-0", after="1-0")
    found = [await branch_point(gateway, "s", "ann", f"{n}-0") for n in (2, 4, 5, 6, 7)]
    assert found == ["1-9999999999", "1-5", "3-0", "5-9999999999", "1-0"]


async def test_no_question_takes_the_place_of_one_that_is_not_its_users_in_this_session(gateway: Gateway) -> None:
    await opened(gateway, turn(2))
    await recorded(gateway, "5-0", session_id="t")
    await recorded(gateway, "6-0", user_id="bob")
    for query_id, wanted in (("5-0", "not_found"), ("6-0", "not_found"), ("8-0", "not_found"), ("x", "bad_query_id")):
        with pytest.raises(ApiError) as refused:
            await branch_point(gateway, "s", "ann", query_id)
        assert (refused.value.status_code, refused.value.code) == (400 if query_id == "x" else 404, wanted)


async def left(gateway: Gateway) -> tuple[list[str], list[str]]:
    """The turns of the session, and what else it lists of queries."""
    listed = await gateway.bus.link.call("ZRANGE", queries_key("s"), 0, -1)
    return [one.query_id for one in await gateway.sessions.every_turn("s")], [one.decode() for one in listed]


async def waiting(gateway: Gateway, *query_ids: str) -> None:
    """Queries that wait for their turn."""
    for query_id in query_ids:
        await gateway.bus.link.pipe(
            [
                ("XADD", QUERY_RECEIVED.stream, query_id, "session_id", "s"),
                ("ZADD", lane_key("A", "s"), 0, padded(query_id)),
                ("ZADD", queries_key("s"), 9e12, query_id),
            ]
        )


async def cancelled(gateway: Gateway, numbers: Iterable[int], how: bytes = b"1") -> list[int]:
    """Those that are stopped, without those that are taken back."""
    return [n for n in numbers if await gateway.bus.link.call("GET", cancel_key(f"{n}-0")) == how]


async def test_the_same_words_stop_what_waits_behind_them_and_remove_nothing(gateway: Gateway) -> None:
    await opened(gateway, turn(3), turn(5, after=3))
    await waiting(gateway, "2-0", "4-0", "6-0", "7-0", "8-0", "9-0")
    await supersede(gateway, record("8-0", "  q3 "), "3-0")
    assert await cancelled(gateway, range(1, 10)) == [4, 6, 7]
    assert await left(gateway) == (["3-0", "5-0"], ["2-0", "4-0", "6-0", "7-0", "8-0", "9-0"])


async def test_edit_of_a_replaced_query_takes_its_successors_back(gateway: Gateway) -> None:
    await opened(gateway, turn(3), turn(5, after=3))
    await waiting(gateway, "2-0", "4-0", "6-0", "8-0", "9-0")
    await supersede(gateway, record("8-0", "other"), "4-0")
    assert await cancelled(gateway, range(1, 10), b"taken back") == [4, 6]
    assert await left(gateway) == (["3-0", "5-0"], ["2-0", "8-0", "9-0"])


async def test_other_words_remove_the_replaced_turns_and_later_ones_only(gateway: Gateway) -> None:
    # 3 and its version 5 leave, with what was said behind either; 10 is answered already, and 12 came later
    await opened(gateway, turn(2), turn(3), turn(4), turn(5, after=2), turn(10, after=2), turn(12, after=2))
    await unanswered(gateway, "7-0")
    await unanswered(gateway, "1-0")
    for query_id in ("1-0", "2-0", "6-0", "10-0", "11-0"):
        # what leaves is the first of the list
        await gateway.bus.link.call("ZADD", queries_key("s"), 8e12 if query_id == "6-0" else 9e12, query_id)
        await recorded(gateway, query_id)
    await waiting(gateway, "8-0")
    await recorded(gateway, "8-0")
    await recorded(gateway, "3-0", query="q3")
    await supersede(gateway, record("10-0"), "3-0")
    # what does not stop in time is taken back, and what is kept of it goes with its answer
    assert await cancelled(gateway, range(1, 13), b"taken back") == [3, 4, 5, 6, 7, 8]
    assert await left(gateway) == (["2-0", "10-0", "12-0"], ["1-0", "10-0", "11-0", "2-0"])
    (told,) = await gateway.bus.range(QUERY_FORGET.stream)
    gone = QUERY_FORGET.decode(Envelope.parse(QUERY_FORGET.name, *told))
    assert (gone.user_id, gone.session_id, gone.queries) == ("ann", "s", [f"{n}-0" for n in (3, 4, 5, 6, 7, 8)])
    records = [("EXISTS", record_key(f"{n}-0")) for n in (1, 3, 6, 8, 10)]
    assert await gateway.bus.link.pipe(records) == [1, 0, 0, 1, 1]
    # a repeat finds nothing more
    await supersede(gateway, record("10-0"), "3-0")
    assert len(await gateway.bus.range(QUERY_FORGET.stream)) == 1
    assert await cancelled(gateway, range(1, 13), b"taken back") == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("words", ["other", "q6"])
async def test_of_two_that_take_one_place_at_once_the_later_one_stands(words: str, gateway: Gateway) -> None:
    # 3 has given way to 6 before 9, which takes its place too, has looked for it
    await opened(gateway, turn(2), turn(6, after=2), turn(7))
    await supersede(gateway, record("9-0", words, after="2-5"), "3-0")
    # the same words are a further version
    assert (await left(gateway))[0] == (["2-0"] if words == "other" else ["2-0", "6-0", "7-0"])


async def test_a_question_without_an_answer_gives_way_too(gateway: Gateway) -> None:
    await opened(gateway, turn(2))
    await unanswered(gateway, "7-0")
    await supersede(gateway, record("10-0", "other words"), "7-0")
    (told,) = await gateway.bus.range(QUERY_FORGET.stream)
    assert QUERY_FORGET.decode(Envelope.parse(QUERY_FORGET.name, *told)).queries == ["7-0"]
    assert (await left(gateway))[0] == ["2-0"]
    assert await gateway.bus.link.call("EXISTS", steps_key("s")) == 0


async def test_answer_that_ends_as_it_is_taken_back_is_removed(
    gateway: Gateway, gateway_behind_proxy: Gateway, proxy: Proxy
) -> None:
    await opened(gateway, turn(2))
    await waiting(gateway, "3-0", "9-0")
    await recorded(gateway, "3-0", query="q3")

    async def end() -> None:
        await lanes.leave(gateway.bus, "s", "A", "3-0")

    proxy.before = once(b"taken back", end)
    await supersede(gateway_behind_proxy, record("9-0", "other"), "3-0")
    assert await left(gateway) == (["2-0"], ["9-0"])
    assert await gateway.bus.link.call("EXISTS", record_key("3-0")) == 0


@pytest.mark.parametrize("written", [True, False], ids=["something was written", "without a word"])
async def test_partial_answer_of_a_replaced_query_is_removed(gateway: Gateway, written: bool) -> None:
    await opened(gateway, turn(2))
    await waiting(gateway, "3-0", "9-0")
    await recorded(gateway, "3-0", query="q3")

    async def stopping() -> None:
        while not await cancelled(gateway, [3]):
            await asyncio.sleep(0)
        if written:
            await gateway.bus.link.pipe(gateway.sessions.appending("s", "A", turn(3)))
        # its generator acknowledges it behind that
        await lanes.leave(gateway.bus, "s", "A", "3-0")

    async with asyncio.timeout(60):
        # the new question is in the lane as well, and nobody waits for that
        await asyncio.gather(supersede(gateway, record("9-0", "other"), "3-0"), stopping())
    assert (await left(gateway))[0] == ["2-0"]
    assert await gateway.bus.link.call("EXISTS", record_key("3-0")) == 0
