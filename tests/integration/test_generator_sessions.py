"""Order in a session, across replicas; respondent B beside A; run-time settings in every replica."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import orjson
import pytest
import redis
from support.entries import event_of
from support.services import announced, running
from support.stack import Stage, order, respondent, shown, stage
from support.waiting import eventually

from shared.bus.keys import journal_key, settings_key, steps_key, waiting_key
from shared.contracts import (
    ANSWER_DIALOG,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    SETTINGS_UPDATE,
    QueryReceived,
    SettingsUpdate,
)
from shared.records.journal import EntryType, JournalWriter

SLOW = {"respond": {"text": "You asked: <<query>>", "pace": 0.01}}


async def test_two_queries_of_a_session_at_once_are_answered_in_order(redis_url: str) -> None:
    async with stage(redis_url, [SLOW], replicas=2) as on:
        first, second = await asyncio.gather(on.ask("first", "s1"), on.ask("second", "s1"))
        await asyncio.gather(on.answer(first), on.answer(second))
        one, two = sorted((first, second), key=order)
        (early,) = [r for r in on.server.requests if r.query == ("first" if one == first else "second")]
        (late,) = [r for r in on.server.requests if r is not early]
        dialogs = await on.published(ANSWER_DIALOG)
    assert [m["content"] for m in late.body["messages"][1:]] == [
        early.query,
        f"You asked: {early.query}",
        late.query,
    ]
    assert early.ended_at is not None
    assert early.ended_at <= late.at
    assert [d.query_id for d in dialogs] == [one, two]


async def test_twenty_sessions_of_five_queries_keep_their_order_and_run_in_parallel(redis_url: str) -> None:
    sessions = [f"s{n}" for n in range(20)]
    async with stage(redis_url, [SLOW], replicas=2) as on:
        asked: dict[str, list[str]] = {session: [] for session in sessions}
        for round_ in range(5):
            ids = await asyncio.gather(*(on.ask(f"{s} {round_}", s) for s in sessions))
            for session, query_id in zip(sessions, ids, strict=True):
                asked[session].append(query_id)
        await asyncio.gather(*(on.ended(q, 30) for ids in asked.values() for q in ids))
        requests = list(on.server.requests)
        owners = {(await on.journal(q))[0].value()["replica"] for ids in asked.values() for q in ids}
        for session in sessions:
            assert [t.query_id for t in await on.turns(session)] == asked[session]
        await on.idle()
        assert len(await on.published(RESPONSE_GENERATION)) == 100
    assert len(owners) == 2
    for session in sessions:
        mine = sorted((r for r in requests if r.query.split()[0] == session), key=lambda r: r.at)
        assert [r.query for r in mine] == [f"{session} {n}" for n in range(5)]
        assert all((a.ended_at or 0) <= b.at for a, b in pairwise(mine))
        assert [len(r.body["messages"]) for r in mine] == [2, 4, 6, 8, 10]
    at_once = max(sum(a.at <= b.at < (a.ended_at or 0) for a in requests) for b in requests)
    assert at_once > 4
    assert at_once <= 8


async def test_before_a_session_s_first_query_nothing_is_looked_for_but_by_who_takes_it_over(
    redis_url: str, raw: redis.Redis
) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "You asked: one"}]
    async with stage(redis_url) as on:
        await on.answer(await on.ask("one", "s1"))
        # it is none, and shows what is read
        await on.answer(await on.ask("two", "s1", first=True))
        assert on.server.requests[-1].body["messages"][1:] == [{"role": "user", "content": "two"}]
    async with stage(redis_url, replicas=0) as on:
        query_id = await on.ask("three", "s1", first=True)
        raw.xreadgroup("generator", "dead", {"local2:query.received": ">"})
    async with stage(redis_url) as on:
        await on.answer(query_id)
        assert on.server.requests[-1].body["messages"][1:3] == said


@pytest.mark.parametrize("respond", [{"text": "Hello."}, {"status": 400, "error": "no"}])
async def test_a_session_that_its_gateway_could_not_make_any_more_is_made_with_its_first_answer(
    redis_url: str, respond: dict[str, Any]
) -> None:
    async with stage(redis_url, [{"respond": respond}]) as on:
        payload = QueryReceived(session_id="s1", query="Hi.", user_id=on.user, first=True)
        (query_id,) = await on.bus.publish(QUERY_RECEIVED.of(payload, session_id="s1", user_id=on.user))
        await on.ended(query_id)
        info = await on.sessions.info("s1")
        assert info is not None
        assert (info.user_id, info.title) == (on.user, "Hi.")
        assert [one.session_id for one in await on.sessions.of_user(on.user, 10)] == ["s1"]


@pytest.mark.parametrize("replicas", [1, 2])
async def test_every_waiting_query_is_woken_when_its_turn_comes(redis_url: str, replicas: int) -> None:
    async with stage(redis_url, replicas=replicas) as on:
        ids = [await on.ask(f"n{number}", "s1") for number in range(12)]
        ends = [(await on.ended(query_id)).time for query_id in ids]
        assert ends == sorted(ends)
        starts = [(await on.journal(query_id))[0].time for query_id in ids]
    # a lost wake would show as the second after which a waiting query looks by itself
    pauses = [start - end for end, start in zip(ends, starts[1:], strict=False)]
    assert max(pauses) < 800


async def test_query_whose_wake_up_was_lost_is_answered(redis_url: str, raw: redis.Redis) -> None:
    """The replica that left the queue died before it sent the message."""
    hold = {"when": {"user": "^hold"}, "respond": {"text": "x", "delay": 1}}
    async with stage(redis_url, [hold]) as on:
        holding = await on.ask("hold", "s1")
        await on.seen(holding, EntryType.STATE, action="START_GENERATION")
        later = await on.ask("later", "s1")
        await eventually(lambda: raw.hlen(waiting_key("A", "s1")))
        raw.delete(waiting_key("A", "s1"))
        await on.answer(later)


async def test_whoever_waits_for_its_turn_does_not_ask_without_a_pause(redis_url: str, raw: redis.Redis) -> None:
    stall = {"when": {"user": "^hold"}, "respond": {"text": "x", "fault": {"kind": "stall"}}}
    async with stage(redis_url, [stall]) as on:
        holding = await on.ask("hold", "s1")
        await on.seen(holding, EntryType.STATE, action="START_GENERATION")
        later = await on.ask("later", "s1")
        (inbox,) = await eventually(lambda: raw.hvals(waiting_key("A", "s1")))
        # woken though it is not its turn: it looks once, and waits again
        raw.xadd(inbox, {"type": "wake", "session": "s1"})
        before = raw.info("commandstats")["cmdstat_zrange"]["calls"]
        await asyncio.sleep(2.0)
        looks = raw.info("commandstats")["cmdstat_zrange"]["calls"] - before
        # those who look for each other do so five times a second while a stack starts
        assert looks <= 30
        await on.cancel(holding)
        assert await on.answer(later) == "You asked: later"


async def test_an_answer_that_takes_many_times_the_claim_is_written_by_one_replica(redis_url: str) -> None:
    slow = {"respond": {"text": "one two three four five six seven eight", "pace": 0.25}}
    async with stage(redis_url, [slow], replicas=3, heartbeat=0.1) as on:
        query_id = await on.ask("go", "s1")
        assert await on.answer(query_id) == "one two three four five six seven eight"
        assert (await on.types(query_id)).count("claimed") == 1
        assert len(on.server.requests) == 1


async def test_waiting_for_a_turn_leaves_the_slots_to_other_sessions(redis_url: str) -> None:
    stall = {"when": {"user": "^hold"}, "respond": {"text": "x", "fault": {"kind": "stall"}}}
    async with stage(redis_url, [stall], concurrency=2) as on:
        holding = await on.ask("hold", "s1")
        queued = [await on.ask(f"later {n}", "s1") for n in range(6)]
        assert await on.answer(await on.ask("other", "s2"), timeout=5) == "You asked: other"
        assert [await on.types(query_id) for query_id in queued] == [[]] * 6
        await on.cancel(holding)
        for number, query_id in enumerate(queued):
            assert await on.answer(query_id) == f"You asked: later {number}"
        assert [t.query for t in await on.turns("s1")] == [f"later {n}" for n in range(6)]


async def test_a_query_that_failed_gives_the_turn_to_the_next(redis_url: str) -> None:
    bad = {"when": {"user": "^bad"}, "respond": {"status": 400, "error": "no"}}
    async with stage(redis_url, [bad], replicas=2) as on:
        ids = [await on.ask(text, "s1") for text in ("bad", "good", "bad", "fine")]
        ends = [(await on.ended(query_id)).type for query_id in ids]
        assert ends == [EntryType.FAILED, EntryType.COMPLETED, EntryType.FAILED, EntryType.COMPLETED]
        assert [t.query for t in await on.turns("s1")] == ["good", "fine"]


# ── respondent B ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_query_whose_journal_has_ended_only_leaves_its_queue(redis_url: str) -> None:
    async with stage(redis_url, replicas=0) as on:
        query_id, other = await on.ask("done", "s1"), await on.ask("other", "s1")
        writer = await JournalWriter.begin(on.bus, journal_key(query_id, "A"), event_of("claimed", {}), 600)
        assert writer is not None
        # Its owner died before it acknowledged the entry.
        await writer.append(event_of(EntryType.FAILED, {"code": "model_error", "message": "away"}))
        before = await on.journal(query_id)
    async with stage(redis_url) as on:
        assert await on.answer(other) == "You asked: other"
        await on.idle()
        assert await on.journal(query_id) == before
        assert [r.query for r in on.server.requests] == ["other"]


async def test_a_session_that_is_deleted_before_its_turn_comes_does_not_come_back(redis_url: str) -> None:
    async with stage(redis_url, replicas=0) as on:
        query_id = await on.ask("hello", "deleted")
        info = await on.sessions.info("deleted")
        assert info is not None
        await on.sessions.delete(info)
        async with running(respondent(on.settings), on.settings):
            await eventually(lambda: on.bus.finished(QUERY_RECEIVED.stream, "generator", query_id))
            await on.idle()
        assert await on.sessions.info("deleted") is None
        assert await on.journal(query_id) == []
        assert await on.sessions.of_user(on.user, 10) == []
        assert await on.turns("deleted") == []


async def test_answer_to_a_query_taken_back_meanwhile_leaves_nothing(redis_url: str) -> None:
    """As when its user edits the question while the answer is written."""
    slow = {"respond": {"text": "one two three four", "pace": 0.1}}
    async with stage(redis_url, [slow]) as on:
        query_id = await on.ask("go", "s1")
        await on.seen(query_id, EntryType.ANSWER)
        await on.sessions.take_back([query_id])
        await on.idle()
        assert await on.turns("s1") == []
        assert await on.journal(query_id) == []
        assert await on.published(RESPONSE_GENERATION) == []


async def test_respondent_b_answers_into_its_own_journal_and_history(redis_url: str) -> None:
    rules = [
        {"when": {"model": "other"}, "respond": {"text": "B says <<query>>"}},
        {"respond": {"text": "A says <<query>>"}},
    ]
    async with stage(redis_url, rules) as on:
        settings = on.settings.model_copy(update={"respondent_id": "B", "model": "other", "temperature": 0.5})
        async with running(respondent(settings), settings):
            await announced(redis_url, "respondent-b")
            for text in ("one", "two"):
                query_id = await on.ask(text, "s1", respondents=("A", "B"))
                assert await on.answer(query_id) == f"A says {text}"
                assert await on.answer(query_id, respondent="B") == f"B says {text}"
            await on.idle("respondent-b")
            await on.idle("generator")
            generations = await on.published(RESPONSE_GENERATION, query_id)
            by_b = [r.body for r in on.server.requests if r.model == "other"]
            claimed = (await on.journal(query_id, "B"))[0].value()
            assert [t.answer for t in await on.turns("s1")] == ["A says one", "A says two"]
            assert [t.answer for t in await on.turns("s1", "B")] == ["B says one", "B says two"]
    found = {(g.respondent_id, g.generator_id, g.response_id, g.model) for g in generations}
    assert found == {
        ("A", "GeneratorAgent", f"{query_id}:A", "gemma4:e4b"),
        ("B", "respondent_b", f"{query_id}:B", "other"),
    }
    assert claimed["respondent_id"] == "B"
    assert [m["content"] for m in by_b[1]["messages"][1:]] == ["one", "B says one", "two"]
    assert by_b[1]["options"]["temperature"] == 0.5


async def test_events_of_the_second_respondent_are_not_stored(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url, respondent_id="B", yield_above=None) as on:
        await on.answer(await on.ask("one", "s1", respondents=("B",)), respondent="B")
        await on.idle("respondent-b")
    assert not raw.exists(steps_key("s1"))
    async with stage(redis_url) as on:
        await on.answer(await on.ask("two", "s1"))
    assert raw.exists(steps_key("s1"))


async def test_both_respondents_call_tools_under_their_own_ids(redis_url: str) -> None:
    rules: list[dict[str, Any]] = [
        {
            "when": {"tool_results": 0},
            "respond": {"tool_calls": [{"name": "probe", "args": {"text": "<<query>>"}}]},
        },
        {"respond": {"text": "<<result~you said.*>>"}},
    ]
    async with stage(redis_url, rules, probes=1) as on:
        settings = on.settings.model_copy(update={"respondent_id": "B"})
        async with running(respondent(settings), settings):
            await announced(redis_url, "respondent-b")
            query_id = await on.ask("both", respondents=("A", "B"))
            for who in ("A", "B"):
                assert await on.answer(query_id, respondent=who) == "you said both"
                ids = [
                    e.value()["call_id"]
                    for e in await on.journal(query_id, who)
                    if e.type in (EntryType.TOOL_REQUEST, EntryType.TOOL_RESULT)
                ]
                assert ids == [f"{query_id}:{who}:0:0"] * 2
        assert await on.effects() == {"both": 2}


# ── run-time settings ────────────────────────────────────────────────────────────────────────────────────────────


async def change(on: Stage, **values: Any) -> None:
    """As the gateway does: keeps them, then tells every replica."""
    pairs = [part for name, value in values.items() for part in (name, orjson.dumps(value))]
    await on.bus.link.call("HSET", settings_key("generator"), *pairs)
    await on.bus.publish(SETTINGS_UPDATE.of(SettingsUpdate(participant="generator", values=values)))


async def asked_of_each(on: Stage, count: int) -> dict[str, set[tuple[str, Any]]]:
    """(model, temperature) that each replica used for the next queries."""
    ids = await asyncio.gather(*(on.ask(f"q{n} {count}") for n in range(count)))
    used: dict[str, set[tuple[str, Any]]] = {}
    for query_id in ids:
        await on.answer(query_id)
        (generation,) = await on.published(RESPONSE_GENERATION, query_id)
        replica = (await on.journal(query_id))[0].value()["replica"]
        used.setdefault(replica, set()).add((generation.model, generation.options.get("temperature")))
    return used


async def test_new_settings_hold_for_the_next_query_in_every_replica_and_after_a_restart(redis_url: str) -> None:
    async with stage(redis_url, [SLOW], replicas=2) as on:
        await asked_of_each(on, 4)
        await change(on, model="other:1b", temperature=0.3)

        async def changed() -> bool:
            used = await asked_of_each(on, 12)
            return len(used) == 2 and all(values == {("other:1b", 0.3)} for values in used.values())

        await eventually(changed, 5)
    async with stage(redis_url, [SLOW]) as on:
        assert set.union(*(await asked_of_each(on, 3)).values()) == {("other:1b", 0.3)}


async def test_a_setting_out_of_range_changes_nothing(redis_url: str) -> None:
    async with stage(redis_url) as on:
        await on.bus.publish(
            SETTINGS_UPDATE.of(SettingsUpdate(participant="generator", values={"temperature": 9, "model": "x"})),
            SETTINGS_UPDATE.of(SettingsUpdate(participant="generator", values={"redis_url": "redis://elsewhere"})),
            SETTINGS_UPDATE.of(SettingsUpdate(participant="respondent-b", values={"model": "not mine"})),
            SETTINGS_UPDATE.of(SettingsUpdate(participant="generator", values={"temperature": 0.7})),
        )

        async def applied() -> bool:
            await on.answer(await on.ask("go"))
            return on.server.requests[-1].body["options"].get("temperature") == 0.7

        await eventually(applied)
        assert {r.model for r in on.server.requests} == {"gemma4:e4b"}


@pytest.mark.parametrize("limit", [0, 1])
async def test_the_number_of_turns_given_to_the_model_is_a_setting(redis_url: str, limit: int) -> None:
    # without summaries: one is asked for in the background, at any time after the second answer
    async with stage(redis_url, history_turns=limit, compact=False) as on:
        for number in range(3):
            query_id = await on.ask(f"n{number}", "s1")
            await on.answer(query_id)
        assert len(on.server.requests[-1].body["messages"]) == 2 + 2 * limit
        assert shown(await on.journal(query_id)) == "You asked: n2"


async def test_a_replica_that_stops_hands_its_query_over_at_once(redis_url: str, raw: redis.Redis) -> None:
    once = {"times": 1, "respond": {"text": "one two three", "pace": 0.02, "fault": {"kind": "stall", "after": 2}}}
    # the heartbeat is so slow that a take-over by time-out would come too late
    async with stage(redis_url, [once], replicas=0) as on:
        settings = on.settings.model_copy(update={"heartbeat": 10.0, "drain": 0.1})
        async with running(respondent(settings), settings):
            query_id = await on.ask("go")
            await on.seen(query_id, EntryType.ANSWER)
        async with running(respondent(on.settings), on.settings):
            assert await on.answer(query_id, timeout=3) == "You asked: go"
            assert shown(await on.journal(query_id)) == "You asked: go"
            await on.idle()
        left = {row["name"]: row["pending"] for row in raw.xinfo_consumers("local2:query.received", "generator")}
        assert left == {b"handover": 0}
