"""Cancelling and deadlines: the model stops, the tools stop, the journal ends, the session goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis
from support.stack import stage
from support.waiting import always, eventually

from shared.bus import StreamTailer
from shared.contracts import AGENT_TRANSITION, QUERY_RECEIVED, RESPONSE_GENERATION, QueryReceived
from shared.records.journal import EntryType

HOLD: dict[str, Any] = {
    "when": {"user": "^hold"},
    "respond": {
        "thinking": "let me think",
        "text": "one two three four",
        "pace": 0.01,
        "fault": {"kind": "stall", "after": 5},
    },
}


async def test_a_cancel_closes_the_models_connection_and_keeps_what_was_written(redis_url: str) -> None:
    async with stage(redis_url, [HOLD]) as on:
        query_id = await on.ask("hold on", "s1")
        await on.seen(query_id, EntryType.ANSWER)
        await on.server.wait_until(lambda server: server.requests[0].chunks == 5)
        await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await on.cancel(query_id)
        await on.server.wait_until(lambda server: len(server.aborted) == 1, timeout=1.0)
        end = await on.ended(query_id, timeout=1.0)
        assert loop.time() - began < 1.0
        assert end.type is EntryType.CANCELLED
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        # what a call that was broken off took no server tells
        assert end.value() == {"answer": "one two ", "thinking": "let me think", "usage": usage}
        (turn,) = await on.turns("s1")
        assert (turn.answer, turn.interrupted) == ("one two ", True)
        await on.idle()
        assert await on.published(RESPONSE_GENERATION) == []
        assert [t.to for t in await on.published(AGENT_TRANSITION, query_id)][2:] == ["ERROR", "IDLE"]
        assert Counter(await on.logged(query_id)) == {"query.received": 1, "agent.transition": 4, "query.cancel": 1}
        # the next query of the session sees the part
        await on.answer(await on.ask("go on", "s1"))
        assert [m["content"] for m in on.server.requests[-1].body["messages"][1:]] == ["hold on", "one two ", "go on"]


async def test_a_cancel_before_any_text_leaves_no_turn(redis_url: str) -> None:
    silent = {"when": {"user": "^hold"}, "respond": {"text": "x", "fault": {"kind": "stall"}}}
    async with stage(redis_url, [silent]) as on:
        query_id = await on.ask("hold", "s1")
        await on.server.wait_until(lambda server: server.streaming == 1)
        await on.cancel(query_id)
        assert (await on.ended(query_id, 1.0)).type is EntryType.CANCELLED
        assert await on.turns("s1") == []


async def test_cancel_of_query_with_its_own_history_stores_no_turn(redis_url: str) -> None:
    async with stage(redis_url, [HOLD]) as on:
        await on.answer(await on.ask("hello", "s1"))
        query_id = await on.ask("hold on", "s1", messages=[])
        await on.seen(query_id, EntryType.ANSWER)
        await on.cancel(query_id)
        assert (await on.ended(query_id)).type is EntryType.CANCELLED
        assert [turn.query for turn in await on.turns("s1")] == ["hello"]


async def test_a_cancel_stops_the_running_tool(redis_url: str) -> None:
    rule = {"respond": {"tool_calls": [{"name": "probe", "args": {"text": "slow", "seconds": 60}}]}}
    async with stage(redis_url, [rule], probes=1) as on:
        # what a replica has just begun to follow it hears of so much later
        await asyncio.sleep(StreamTailer.pause)
        query_id = await on.ask("go")

        async def ran() -> bool:
            return await on.effects() == {"slow": 1}

        await eventually(ran)
        await on.cancel(query_id)
        assert (await on.ended(query_id, 1.0)).type is EntryType.CANCELLED

        async def stopped() -> bool:
            return bool(await on.bus.link.call("HGET", "ended", "slow"))

        await eventually(stopped, 1.0)
        await on.idle()
        assert "query.cancel" in await on.logged(query_id)


async def test_a_cancel_reaches_a_query_that_waits_behind_another(redis_url: str) -> None:
    async with stage(redis_url, [HOLD], replicas=2) as on:
        first = await on.ask("hold", "s1")
        await on.seen(first, EntryType.ANSWER)
        second, third = await on.ask("second", "s1"), await on.ask("third", "s1")
        await on.cancel(second)
        assert (await on.ended(second, 1.0)).type is EntryType.CANCELLED
        await on.cancel(first)
        assert await on.answer(third) == "You asked: third"
        assert "second" not in {r.query for r in on.server.requests}
        assert [t.query for t in await on.turns("s1")] == ["hold", "third"]


async def test_a_query_cancelled_while_no_generator_lives_never_reaches_the_model(redis_url: str) -> None:
    async with stage(redis_url, replicas=0) as on:
        query_id, other = await on.ask("go", "s1"), await on.ask("other", "s1")
        await on.cancel(query_id)
    async with stage(redis_url) as on:
        assert (await on.ended(query_id, 3.0)).type is EntryType.CANCELLED
        assert await on.answer(other) == "You asked: other"
        assert [r.query for r in on.server.requests] == ["other"]
        await on.idle()


async def test_a_cancel_after_the_end_changes_nothing(redis_url: str) -> None:
    async with stage(redis_url) as on:
        query_id = await on.ask("go", "s1")
        await on.answer(query_id)
        before = await on.journal(query_id)
        await on.cancel(query_id)
        await on.cancel("1-1")
        await on.answer(await on.ask("next", "s1"))
        assert await on.journal(query_id) == before
        assert [t.interrupted for t in await on.turns("s1")] == [False, False]


async def test_cancelling_twice_is_cancelling_once(redis_url: str) -> None:
    async with stage(redis_url, [HOLD]) as on:
        query_id = await on.ask("hold")
        await on.seen(query_id, EntryType.ANSWER)
        for _ in range(5):
            await on.cancel(query_id)
        await on.ended(query_id, 1.0)
        await on.idle()
        assert (await on.types(query_id)).count("cancelled") == 1
        assert await on.answer(await on.ask("next")) == "You asked: next"


@pytest.mark.slow
async def test_a_cancel_at_any_moment_leaves_exactly_one_end(redis_url: str) -> None:
    rules = [
        {
            "when": {"tool_results": 0},
            "respond": {"text": "well ", "tool_calls": [{"name": "probe", "args": {"text": "<<query>>"}}]},
        },
        {"respond": {"text": "one two three"}},
    ]
    async with stage(redis_url, rules, probes=1) as on:
        # what a replica has just begun to follow it hears of so much later
        await asyncio.sleep(StreamTailer.pause)
        ends = set()
        for number in range(60):
            query_id = await on.ask(f"q{number}", "s1")
            await asyncio.sleep(0.0008 * number)
            if number == 59:
                # on a busy machine no answer is complete before that
                await on.ended(query_id)
            await on.cancel(query_id)
            ends.add((await on.ended(query_id)).type)
        await on.idle()
        turns = {turn.query_id: turn for turn in await on.turns("s1")}
        for entry_id, _ in await on.bus.range("local2:query.received"):
            kinds = await on.types(entry_id)
            assert sum(kind in ("completed", "failed", "cancelled") for kind in kinds) == 1
            published = len(await on.published(RESPONSE_GENERATION, entry_id))
            # published as a whole or not at all
            assert published == kinds.count("completed")
            if published and entry_id in turns:
                assert turns[entry_id].answer == "one two three"
    assert ends == {EntryType.CANCELLED, EntryType.COMPLETED}


async def test_that_nobody_follows_does_not_cancel(redis_url: str) -> None:
    async with stage(redis_url, [{"respond": {"text": "a b c d e", "pace": 0.05}}]) as on:
        query_id = await on.ask("go", "s1")

        async def over() -> bool:
            return bool(await on.turns("s1"))

        await eventually(over)
        assert await on.answer(query_id) == "a b c d e"


async def test_a_query_past_its_deadline_fails_and_the_model_is_stopped(redis_url: str) -> None:
    async with stage(redis_url, [HOLD]) as on:
        query_id = await on.ask("hold", "s1", deadline=0.6)
        end = await on.ended(query_id, 3.0)
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "deadline_exceeded")
        await on.server.wait_until(lambda server: len(server.aborted) == 1, timeout=1.0)
        assert await on.turns("s1") == []
        assert await on.answer(await on.ask("next", "s1")) == "You asked: next"


async def test_a_query_that_expired_in_the_queue_never_reaches_the_model(redis_url: str) -> None:
    async with stage(redis_url, replicas=0) as on:
        query_id = await on.ask("too late", "s1", deadline=0.05)
        other = await on.ask("in time", "s1")
        await asyncio.sleep(0.1)
    async with stage(redis_url) as on:
        end = await on.ended(query_id, 3.0)
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "deadline_exceeded")
        await on.answer(other)
        assert [r.query for r in on.server.requests] == ["in time"]


async def test_a_query_that_expires_while_it_waits_for_its_turn_fails(redis_url: str) -> None:
    async with stage(redis_url, [HOLD]) as on:
        first = await on.ask("hold", "s1")
        second = await on.ask("second", "s1", deadline=0.5)
        end = await on.ended(second, 3.0)
        assert end.value()["code"] == "deadline_exceeded"
        assert (await on.types(first))[-1] != "failed"
        await on.cancel(first)


async def test_a_deadline_bounds_the_wait_for_a_tool(redis_url: str) -> None:
    rule = {
        "when": {"tool_results": 0},
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "slow", "seconds": 60}}]},
    }
    async with stage(redis_url, [rule], probes=1) as on:
        query_id = await on.ask("go", deadline=0.8)
        assert (await on.ended(query_id, 3.0)).value()["code"] == "deadline_exceeded"


async def test_a_query_without_a_deadline_gets_the_settings_own(redis_url: str) -> None:
    async with stage(redis_url, [HOLD], deadline_seconds=0.5) as on:
        await on.sessions.open("s1", on.user, "hold")
        payload = QueryReceived(session_id="s1", query="hold", user_id=on.user)
        (query_id,) = await on.bus.publish(QUERY_RECEIVED.of(payload, session_id="s1", user_id=on.user))
        end = await on.ended(query_id, 3.0)
        assert end.value()["code"] == "deadline_exceeded"


async def test_a_cancelled_query_leaves_nothing_pending(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url, [HOLD]) as on:
        query_id = await on.ask("hold")
        await on.seen(query_id, EntryType.ANSWER)
        await on.cancel(query_id)
        await on.ended(query_id, 1.0)
        await on.idle()
        length = raw.xlen(f"local2:journal:{query_id}:A")
        await always(lambda: raw.xlen(f"local2:journal:{query_id}:A") == length, 0.5)
        assert raw.xpending("local2:query.received", "generator")["pending"] == 0
        assert raw.exists("local2:dead.letter") == 0
