"""Long conversations: a summary of the older turns in the place of a cut."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from support.stack import Stage, stage
from support.waiting import eventually

from services.generator.context import DEFAULT_RATIO
from shared.contracts import SESSION_SUMMARISE, Outgoing, SessionSummarise
from shared.records.journal import EntryType
from shared.records.summaries import Summaries, Summary

SUMS_UP: dict[str, Any] = {
    "name": "summary",
    "when": {"system": "running summary"},
    "respond": {"text": "They counted."},
}
SHORT: dict[str, Any] = {"respond": {"text": "I see."}}
# about 800 tokens at the usual estimate, of a room of 3072
LONG = "word " * 480


async def talk(on: Stage, turns: int) -> list[str]:
    asked = []
    for number in range(turns):
        asked.append(await on.ask(f"{number} {LONG}", "s1"))
        await on.answer(asked[-1])
    return asked


async def settled(on: Stage) -> Summary | None:
    """The summary, when nothing is left to be summarised."""

    async def done() -> bool:
        return await on.bus.backlog(SESSION_SUMMARISE.stream, "generator") == 0

    await eventually(done, 15, "nothing left to be summarised")
    return await Summaries(on.bus).read("s1")


async def until_asked_for(on: Stage) -> None:
    """Talks until a summary is asked for."""
    for _ in range(12):
        await talk(on, 1)
        begun = any(r.rule == "summary" for r in on.server.requests)
        if begun or await on.bus.backlog(SESSION_SUMMARISE.stream, "generator"):
            return
    pytest.fail("nobody has asked for a summary")


def contents(on: Stage) -> list[str]:
    """What the model was last given to answer."""
    answered = [request for request in on.server.requests if request.rule != "summary"]
    return [message["content"] for message in answered[-1].body["messages"]]


async def seen(on: Stage, query_id: str) -> dict[str, Any]:
    (message,) = [entry.value() for entry in await on.journal(query_id) if entry.type is EntryType.MESSAGE]
    context: dict[str, Any] = message["context"]
    return context


async def test_no_key_says_that_a_summary_was_asked_for(redis_url: str, raw: redis.Redis) -> None:
    """It would name the session for a day after that was deleted."""
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=4_096) as on:
        await until_asked_for(on)
    assert [key for key in raw.scan_iter() if b"summarise" in key] == [SESSION_SUMMARISE.stream.encode()]


async def test_second_respondent_requests_no_summary(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=4_096, respondent_id="B", yield_above=None) as on:
        for number in range(6):
            await on.answer(await on.ask(f"{number} {LONG}", "s1", respondents=("B",)), respondent="B")
    assert raw.xlen(SESSION_SUMMARISE.stream) == 0


async def test_the_model_reads_a_summary_and_the_turns_since_and_the_session_keeps_all(redis_url: str) -> None:
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=4_096) as on:
        asked: list[str] = []
        summary = None
        while summary is None and len(asked) < 12:
            asked.append(await on.ask(f"{len(asked)} {LONG}", "s1"))
            await on.answer(asked[-1])
            summary = await settled(on)
        assert summary is not None
        assert 1 < summary.turns < len(asked)
        assert summary.until == asked[summary.turns - 1]
        made = next(r for r in on.server.requests if r.rule == "summary")
        assert all(f"User: {n} word" in made.body["messages"][1]["content"] for n in range(summary.turns))
        assert "tools" not in made.body
        assert made.body["options"]["num_ctx"] == 4_096
        (last,) = await talk(on, 1)
        system, *others = contents(on)
        assert system.count("=== EARLIER IN THIS CONVERSATION ===") == 1
        assert system.endswith("They counted.")
        kept = len(asked) - summary.turns
        assert [text[:6] for text in others if text != "I see."] == [
            *(f"{n} word" for n in range(summary.turns, len(asked))), "0 word",
        ]  # fmt: skip
        context = await seen(on, last)
        assert (context["window"], context["turns"], context["cut"]) == (4_096, kept, 0)
        assert (context["summarised"], context["summarised_until"]) == (summary.turns, summary.until)
        assert context["first_turn"] == asked[summary.turns]
        end = (await on.ended(last)).value()
        assert (end["usage"]["context_tokens"], end["usage"]["context_window"]) == (context["tokens"], 4_096)
        # beside the turns, not in their place
        assert [turn.query_id for turn in await on.turns("s1")] == [*asked, last]
        for query_id in [*asked, last]:
            assert EntryType.CONTEXT_TRUNCATED not in await on.types(query_id)


async def test_a_summary_grows_out_of_the_one_before(redis_url: str) -> None:
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=4_096) as on:
        made: list[Summary] = []
        for number in range(20):
            await on.answer(await on.ask(f"{number} {LONG}", "s1"))
            summary = await settled(on)
            if summary is not None and summary not in made:
                made.append(summary)
            if len(made) == 2:
                break
        first, second = [r.body["messages"][1]["content"] for r in on.server.requests if r.rule == "summary"]
        assert "SUMMARY SO FAR" not in first
        assert "User: 0 word" in first
        assert second.startswith("=== SUMMARY SO FAR ===\nThey counted.")
        assert "User: 0 word" not in second
        assert f"User: {made[0].turns} word" in second
        assert made[1].turns > made[0].turns


@pytest.mark.parametrize("values", [{"compact": False}, {"demo": True, "think": False}])
async def test_without_it_what_does_not_fit_is_left_out_and_said(values: dict[str, Any], redis_url: str) -> None:
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=1_600, **values) as on:
        asked = await talk(on, 4)
        assert [r.rule for r in on.server.requests].count("summary") == 0
        assert await settled(on) is None
        cut = [entry.value() for query_id in asked for entry in await on.journal(query_id)
               if entry.type is EntryType.CONTEXT_TRUNCATED]  # fmt: skip
        assert cut[-1]["dropped_turns"] == cut[-1]["cut"] > 0
        assert cut[-1]["kept_turns"] == cut[-1]["turns"]


async def test_more_than_the_model_can_read_at_once_is_summarised_in_parts(redis_url: str) -> None:
    """As after an import, or where the context has become smaller."""
    async with stage(redis_url, [SHORT]) as on:
        asked = await talk(on, 10)
    async with stage(redis_url, [SUMS_UP, SHORT], num_ctx=512) as on:
        wish = SessionSummarise(session_id="s1", user_id=on.user, until=asked[-1])
        await on.bus.publish(SESSION_SUMMARISE.of(wish))
        summary = await settled(on)
        assert summary == Summary(asked[-1], 10, "They counted.")
        read = [r.body["messages"] for r in on.server.requests if r.rule == "summary"]
        assert len(read) > 1
        ratio = (await on.turns("s1"))[-1].ratio or DEFAULT_RATIO
        assert all(len(messages[1]["content"]) < 0.7 * 512 * ratio for messages in read)
        told = "".join(messages[1]["content"] for messages in read)
        assert [told.count(f"User: {n} word") for n in range(10)] == [1] * 10


async def test_of_several_requests_that_wait_the_newest_is_fulfilled(redis_url: str) -> None:
    stalls = {**SUMS_UP, "respond": {"text": "They counted.", "delay": 0.5}}
    async with stage(redis_url, [stalls, SHORT]) as on:
        asked = await talk(on, 8)

        def wish(query_id: str, session: str = "s1") -> Outgoing:
            return SESSION_SUMMARISE.of(SessionSummarise(session_id=session, user_id=on.user, until=query_id))

        await on.bus.publish(wish(asked[2]))
        await on.server.wait_until(lambda server: any(r.rule == "summary" for r in server.requests), 10)
        # one of another session, of fewer turns or that nobody can read supersedes none
        await on.bus.link.call("XADD", SESSION_SUMMARISE.stream, "*", "payload", b"s1")
        newest = (wish(asked[6]), wish(asked[7], "s2"), wish(asked[1]))
        await on.bus.publish(*map(wish, asked[3:6]), *newest)
        assert await settled(on) == Summary(asked[6], 7, "They counted.")
        assert sum(r.rule == "summary" for r in on.server.requests) == 2


async def test_a_summary_of_a_session_that_is_deleted_meanwhile_comes_to_nothing(redis_url: str) -> None:
    stalls = {**SUMS_UP, "respond": {"text": "They counted.", "delay": 0.5}}
    async with stage(redis_url, [stalls, SHORT], num_ctx=4_096) as on:
        await until_asked_for(on)
        await on.server.wait_until(lambda server: any(r.rule == "summary" for r in server.requests), 10)
        info = await on.sessions.info("s1")
        assert info is not None
        await on.sessions.delete(info)
        assert await settled(on) is None


async def test_a_model_that_fails_leaves_the_turns_as_they_are(redis_url: str) -> None:
    fails = {**SUMS_UP, "respond": {"status": 400, "error": "no"}}
    async with stage(redis_url, [fails, SHORT], num_ctx=4_096) as on:
        await until_asked_for(on)
        assert await settled(on) is None
        await talk(on, 1)
        assert "EARLIER IN THIS CONVERSATION" not in contents(on)[0]


async def test_the_gauge_is_the_servers_count_where_it_counts(redis_url: str) -> None:
    async with stage(redis_url, [SHORT]) as on:
        (query_id,) = await talk(on, 1)
        (message,) = [e.value() for e in await on.journal(query_id) if e.type is EntryType.MESSAGE]
    assert message["context"]["tokens"] == message["prompt_tokens"] + message["completion_tokens"] > 0
    assert message["context"]["window"] == 32_000
