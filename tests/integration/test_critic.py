"""The critic on a real bus with a scripted judge over HTTP: grades, comparisons, crashes and a judge that is away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.entries import event_of
from support.lives import unending
from support.services import announced, running
from support.stack import Client
from support.waiting import eventually

from services.critic.pairs import Half, Pairs
from services.critic.rubrics import load_rubrics
from services.critic.service import app
from services.critic.settings import CriticSettings
from shared.bus import Bus
from shared.bus.keys import PAIRS_WAITING, grade_key, journal_key, pair_key, schema_key, settings_key, verdict_key
from shared.contracts import (
    AGENT_TRANSITION,
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    ChatTurnMessage,
    CritiqueResult,
    PairwiseResult,
    RespondentId,
    ResponseGeneration,
    ToolCallRecord,
)
from shared.errors import SettingsError
from shared.participant.complaint import complaint
from shared.participant.registry import Registry
from shared.records.journal import EntryType, JournalWriter, read_journal
from shared.records.sessions import Turn
from shared.testing.model_server import Rules, ScriptedModelServer
from shared.testing.script import Script

GRADE = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Plain and right. [RESULT] 4"}}
PREFERS_FIRST = {"when": {"user": "###Response B:"}, "respond": {"text": "The first is better. [RESULT] A"}}
# the same answer wins wherever it stands
PREFERS_GOOD: Rules = [
    {"when": {"user": "(?s)###Response A:\\s*good"}, "respond": {"text": "It is right. [RESULT] A"}},
    {"when": {"user": "(?s)###Response B:\\s*good"}, "respond": {"text": "It is right. [RESULT] B"}},
]


def generation(
    query_id: str, respondent: RespondentId = "A", answer: str = "good", **fields: Any
) -> ResponseGeneration:
    values: dict[str, Any] = {
        "query_id": query_id,
        "response_id": f"{query_id}:{respondent}",
        "session_id": "s1",
        "user_id": "u1",
        "respondent_id": respondent,
        "generator_id": "g",
        "query": "Is it right?",
        "answer": answer,
        "model": f"m-{respondent}",
        "options": {"temperature": 0.5},
        "finish_reason": "stop",
    }
    return ResponseGeneration(**{**values, **fields})


class Court(Client):
    def __init__(self, bus: Bus, server: ScriptedModelServer, settings: CriticSettings) -> None:
        super().__init__(bus)
        self.server = server
        self.settings = settings

    async def submit(self, *responses: ResponseGeneration) -> None:
        await self.bus.publish(
            *(RESPONSE_GENERATION.of(r, correlation_id=r.query_id, respondent_id=r.respondent_id) for r in responses)
        )

    async def settled(self, timeout: float = 20.0) -> None:
        """Returns when the critic has finished everything."""

        async def done() -> bool:
            return await self.bus.backlog(RESPONSE_GENERATION.stream, "critic") == 0

        await eventually(done, timeout, "nothing left for the critic")

    async def critiques(self) -> list[CritiqueResult]:
        return await self.published(CRITIQUE_RESULT)

    async def verdicts(self) -> list[PairwiseResult]:
        return await self.published(PAIRWISE_RESULT)


@contextlib.asynccontextmanager
async def court(
    url: str, rules: Rules = (GRADE, PREFERS_FIRST), *, replicas: int = 1, **values: Any
) -> AsyncIterator[Court]:
    async with (
        ScriptedModelServer(rules) as server,
        Bus(url, "test/client") as bus,
        contextlib.AsyncExitStack() as stack,
    ):
        common: dict[str, Any] = {
            "redis_url": url,
            "heartbeat": 0.2,
            "drain": 0.2,
            "ollama_host": server.url,
            "base_url": server.url,
            "yield_rest": 0,
        }
        settings = CriticSettings(**{**common, "skip_tool_answers": True, **values})
        for _ in range(replicas):
            await stack.enter_async_context(running(app, settings))
        await announced(url, "critic", replicas)
        yield Court(bus, server, settings)


async def test_gemini_grades_without_settings_of_the_critic(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_BACKEND", "google_genai")
    monkeypatch.setenv("LOCAL2_MODEL", "gemini-3-flash")
    own = CriticSettings.load("critic")
    async with court(redis_url, backend=own.backend, model=own.model, gemini_api_key="k") as on:
        await on.submit(generation("1-1"))
        await on.settled()
        (critique,) = await on.critiques()
    assert (critique.score, critique.feedback) == (4, "Plain and right.")
    assert [request.model for request in on.server.requests] == ["gemini-3-flash"]


async def test_an_answer_is_graded_with_feedback_and_rubric(redis_url: str) -> None:
    async with court(redis_url) as on:
        await on.submit(generation("1-1"))
        await on.settled()
        (critique,) = await on.critiques()
    assert (critique.score, critique.feedback, critique.rubric) == (4, "Plain and right.", "realistic")
    assert (critique.response_id, critique.respondent_id, critique.answer) == ("1-1:A", "A", "good")
    (request,) = on.server.requests
    assert [said.model_dump(include={"role", "content"}) for said in critique.prompt or ()] == request.body["messages"]


async def test_what_the_judge_read_is_not_told_where_it_holds_what_is_kept_nowhere(redis_url: str) -> None:
    async with court(redis_url) as on:
        await on.submit(generation("1-1").model_copy(update={"material": "a file"}))
        await on.settled()
        (critique,) = await on.critiques()
    assert (critique.score, critique.prompt) == (4, None)


async def test_an_answer_that_another_program_wrote_needs_neither_an_envelope_nor_an_entrys_id(
    redis_url: str, raw: redis.Redis
) -> None:
    async with court(redis_url) as on:
        await on.sessions.open("s1", "u1", "hello")
        await on.bus.link.pipe(on.sessions.appending("s1", "B", Turn("1-1", "Tell me of Paris.", "It is a city.", 0)))
        for side in ("A", "B"):
            raw.xadd(RESPONSE_GENERATION.stream, {"payload": generation("my-id", side).model_dump_json()})
        await on.settled()
        # B's, whichever was graded first
        graded = [request.body["messages"][-1]["content"] for request in on.server.requests[:2]]
        assert sorted("Tell me of Paris." in prompt for prompt in graded) == [False, True]
    for subject, envelopes in ((CRITIQUE_RESULT, [b"A", b"B"]), (PAIRWISE_RESULT, [b"A"])):
        found = [fields for _, fields in raw.xrange(subject.stream)]
        assert sorted(fields[b"respondent_id"] for fields in found) == envelopes
        for fields in found:
            assert (fields[b"correlation_id"], fields[b"session_id"], fields[b"user_id"]) == (b"my-id", b"s1", b"u1")


async def test_the_judge_sees_the_question_in_its_conversation_and_the_tools_results(redis_url: str) -> None:
    call = ToolCallRecord(tool="web_search", args={}, result="Paris has 2 million people.", call_id="c")
    async with court(redis_url, skip_tool_answers=False) as on:
        await on.sessions.open("s1", "u1", "hello")
        for turn in (Turn("1-1", "Tell me of Paris.", "It is a city.", 0), Turn("9-9", "later", "later", 0)):
            await on.bus.link.pipe(on.sessions.appending("s1", "A", turn))
        await on.submit(generation("5-1", tool_calls=[call]))
        await on.settled()
        (critique,) = await on.critiques()
        prompt = on.server.requests[-1].body["messages"][-1]["content"]
    assert critique.rubric == "style"
    assert "User: Tell me of Paris.\nAssistant: It is a city." in prompt
    assert "later" not in prompt
    # what was found is no answer to be like
    assert "(context, not an answer):\nweb_search: Paris has 2 million people." in prompt
    assert "###Reference Answer" not in prompt


@pytest.mark.parametrize("order", ["AB", "BA"])
async def test_answers_are_compared_in_the_conversation_that_was_seen(order: str, redis_url: str) -> None:
    """Each respondent goes on from its own answers; the user saw A's, whichever answer comes second."""
    async with court(redis_url) as on:
        await on.sessions.open("s1", "u1", "hello")
        for side in "AB":
            await on.bus.link.pipe(on.sessions.appending("s1", side, Turn("1-1", "Why?", f"As {side} said.", 0)))
        for side in order:
            await on.submit(generation("5-1", side))  # type: ignore[arg-type]
            await on.settled()
        prompts = [request.body["messages"][-1]["content"] for request in on.server.requests]
    compared = [prompt for prompt in prompts if "###Response B:" in prompt]
    assert len(compared) == 2
    assert all("As A said." in prompt and "As B said." not in prompt for prompt in compared)
    graded = [prompt for prompt in prompts if "###Response to evaluate:" in prompt]
    assert sorted("As B said." in prompt for prompt in graded) == [False, True]


async def test_answers_that_used_tools_are_left_out_unless_told_otherwise(redis_url: str) -> None:
    call = ToolCallRecord(tool="web_search", args={}, result="x", call_id="c")
    async with court(redis_url) as on:
        await on.submit(generation("1-1", tool_calls=[call]), generation("1-1", "B"))
        await on.settled()
        critiques, verdicts = await on.critiques(), await on.verdicts()
        waiting = await Pairs(on.bus).waiting()
    assert [c.respondent_id for c in critiques] == ["B"]
    assert (verdicts, waiting) == ([], 0)


async def test_a_rubric_that_there_is_not_is_refused_and_never_stops_a_critic(
    redis_url: str, raw: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "brevity.txt").write_text("[Short?]\n" + "\n".join(f"Score {n}: {n}" for n in range(1, 6)))
    raw.hset(settings_key("critic"), "rubrics", '{"web_search": "gone"}')
    async with court(redis_url, rubrics_dir=tmp_path):
        schema = orjson.loads(raw.get(schema_key("critic")) or b"")["schema"]
    said = complaint(schema, {"rubrics": {"web_fetch": "brefity"}})
    assert said is not None
    assert said.startswith("rubrics.web_fetch: 'brefity' is not one of ['brevity', 'clarity'")
    assert complaint(schema, {"rubrics": {"web_fetch": "brevity"}}) is None
    with pytest.raises(SettingsError, match="there is no brefity"):
        CriticSettings(rubrics={"web_fetch": "brefity"}, rubrics_dir=tmp_path)


@pytest.mark.parametrize("order", [("A", "B"), ("B", "A")])
async def test_two_answers_are_compared_in_any_order_of_arrival(redis_url: str, order: Sequence[RespondentId]) -> None:
    async with court(redis_url, [*PREFERS_GOOD, GRADE]) as on:
        for respondent in order:
            await on.submit(generation("1-1", respondent, "good" if respondent == "B" else "bad"))
            await on.settled()
        (verdict,) = await on.verdicts()
    assert (verdict.winner, verdict.forward, verdict.swapped) == ("B", "B", "B")
    assert (verdict.score_a, verdict.score_b) == (4, 4)
    assert (verdict.original_query_id, verdict.query_id_a, verdict.query_id_b) == ("1-1", "1-1:A", "1-1:B")
    assert (verdict.config_a["model"], verdict.config_b["model"]) == ("m-A", "m-B")


async def test_a_judge_that_prefers_a_position_makes_a_tie(redis_url: str) -> None:
    async with court(redis_url) as on:
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await on.settled()
        (verdict,) = await on.verdicts()
    assert verdict.winner == "tie"
    assert verdict.reason.startswith("The two orders disagree.")


async def test_what_cannot_be_read_is_asked_again_and_then_published_without_a_score(redis_url: str) -> None:
    vague = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "I would say it is fine, a 4 perhaps."}}
    async with court(redis_url, [vague], attempts=3) as on:
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await on.settled()
        critiques = await on.critiques()
        temperatures = {request.body["options"]["temperature"] for request in on.server.requests}
    assert [c.score for c in critiques] == [None, None]
    assert "no score could be read" in critiques[0].feedback
    assert temperatures == {0.0, 0.3, 0.6}


async def test_an_unreadable_verdict_publishes_nothing_and_nothing_waits(redis_url: str) -> None:
    shrug = {"when": {"user": "###Response B:"}, "respond": {"text": "Hard to say."}}
    async with court(redis_url, [shrug, GRADE], attempts=2) as on:
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await on.settled()
        assert await on.verdicts() == []
        assert await Pairs(on.bus).waiting() == 0


async def test_a_judge_that_is_too_slow_gives_no_score(redis_url: str) -> None:
    slow = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Late. [RESULT] 4", "delay": 5}}
    async with court(redis_url, [slow], attempts=2, grade_timeout=0.2, load_timeout=0) as on:
        await on.submit(generation("1-1"))
        await on.settled()
        (critique,) = await on.critiques()
    assert critique.score is None


async def test_a_missing_judge_is_said_and_does_not_hold_anything_up(redis_url: str) -> None:
    gone = {"when": {}, "respond": {"status": 404, "error": "model 'nosuch:7b' not found"}}
    async with court(redis_url, [gone], model="nosuch:7b") as on:
        await on.submit(generation("1-1"))
        await on.settled()
        (critique,) = await on.critiques()
    assert critique.score is None
    assert "nosuch:7b" in critique.feedback


async def test_a_missing_judge_is_said_once_until_it_is_there(redis_url: str) -> None:
    async with court(redis_url) as on:
        on.server.set_rules(Script.model_validate({"models": {"other": []}}))
        for number in (1, 2, 3):
            await on.submit(generation(f"{number}-1"), generation(f"{number}-1", "B"))
        await on.settled()
        (said,) = await on.critiques()
        assert said.score is None
        assert "does not have the model" in said.feedback
        assert await Pairs(on.bus).waiting() == 0
        on.server.set_rules([GRADE, PREFERS_FIRST])
        await on.submit(generation("4-1"))
        await on.settled()
        assert [one.score for one in await on.critiques()] == [None, 4]


async def test_a_judge_that_is_away_is_waited_for(redis_url: str, tmp_path: Path) -> None:
    async with Bus(redis_url, "test/client") as bus:
        server = ScriptedModelServer([GRADE])
        async with server:
            port = int(server.url.rsplit(":", 1)[1])
        values: dict[str, Any] = {"redis_url": redis_url, "heartbeat": 0.2, "yield_rest": 0}
        values["ollama_host"] = f"http://127.0.0.1:{port}"
        async with running(app, CriticSettings(**values)):
            client = Court(bus, server, CriticSettings(**values))
            await client.submit(generation("1-1"))
            await asyncio.sleep(1.0)
            assert await client.critiques() == []
            async with ScriptedModelServer([GRADE], port=port):
                await client.settled()
                (critique,) = await client.critiques()
    assert critique.score == 4


async def test_at_most_so_many_answers_wait_and_the_oldest_are_given_up(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url, pairwise_buffer=3) as on:
        for n in range(1, 6):
            await on.submit(generation(f"{n}-1"))
            await on.settled()
        assert [name.decode() for name in raw.zrange(PAIRS_WAITING, 0, -1)] == ["3-1", "4-1", "5-1"]
        await on.submit(generation("5-1", "B"), generation("1-1", "B"))
        await on.settled()
        assert [v.original_query_id for v in await on.verdicts()] == ["5-1"]


@contextlib.asynccontextmanager
async def busy(on: Court) -> AsyncIterator[None]:
    """While a user's question is being answered, for which the judge waits."""
    await on.bus.link.call("XGROUP", "CREATE", QUERY_RECEIVED.stream, "generator", "0", "MKSTREAM")
    asked = await on.ask("What is the time?", "s9")
    yield
    await on.bus.link.call("XREADGROUP", "GROUP", "generator", "x", "STREAMS", QUERY_RECEIVED.stream, ">")
    await on.bus.link.call("XACK", QUERY_RECEIVED.stream, "generator", asked)


async def in_line(on: Court, number: int) -> None:
    """Returns when so many answers are held by the critics."""

    async def held() -> bool:
        told = await Registry(on.bus, 0.0).replicas(fresh=True)
        return sum(info.in_flight for info in told if info.participant == "critic") == number

    await eventually(held, 20, f"{number} answers wait")


async def test_the_newest_question_is_judged_first_its_comparison_too_and_the_oldest_are_left_out(
    redis_url: str,
) -> None:
    async with court(redis_url, leave_ungraded_above=6) as on:
        async with busy(on):
            await on.submit(*(generation(f"{n}-1") for n in range(1, 7)))
            await in_line(on, 6)
            # B answered late; no older grade comes before the comparison
            await on.submit(generation("6-1", "B"), generation("5-1", "B"))
            await eventually(lambda: _left(on, 2), 20, "two are left out")
        await on.settled()
        told = [(one.query_id, one.respondent_id) for one in await on.critiques()]
        assert told == [("6-1", "A"), ("6-1", "B"), ("5-1", "A"), ("5-1", "B"), ("4-1", "A"), ("3-1", "A")]
        assert [one.original_query_id for one in await on.verdicts()] == ["6-1", "5-1"]
        steps = [(one.query_id, one.action) for one in await on.published(AGENT_TRANSITION) if one.agent == "critic"]
        compared = [query_id for query_id, action in steps if action in ("GRADE", "COMPARE")]
        assert compared == ["6-1", "6-1", "6-1", "5-1", "5-1", "5-1", "4-1", "3-1"]
        # one of those left out is not waited for by its counterpart
        await on.submit(generation("1-1", "B"))
        await on.settled()
        assert len(await on.verdicts()) == 2
        # what was graded of 3-1 and 4-1 waits for B
        assert await Pairs(on.bus).waiting() == 2


async def _left(on: Court, number: int) -> bool:
    told = [one for one in await on.published(AGENT_TRANSITION) if one.agent == "critic" and one.action == "SKIP"]
    return len(told) == number


async def test_a_second_critic_takes_its_part_of_what_waits_and_what_a_stopped_one_held(redis_url: str) -> None:
    async with court(redis_url) as on:
        async with busy(on):
            await on.submit(*(generation(f"{n}-1") for n in range(1, 141)))
            await in_line(on, 140)
            async with running(app, on.settings):

                async def shared() -> bool:
                    told = await Registry(on.bus, 0.0).replicas(fresh=True)
                    return sorted(info.in_flight for info in told if info.participant == "critic") == [6, 134]

                # A replica holds its half and 64 more.
                await eventually(shared, 20, "the second one holds the rest")
                rows = await on.bus.link.call("XPENDING", RESPONSE_GENERATION.stream, "critic", "-", "+", 200)
                # what was handed back was not tried before
                assert max(deliveries for *_, deliveries in rows) <= 1
            await in_line(on, 140)
        await on.settled()
        assert sorted(one.query_id for one in await on.critiques()) == sorted(f"{n}-1" for n in range(1, 141))


async def test_what_has_waited_too_long_for_a_grade_is_left_ungraded_and_counted(redis_url: str) -> None:
    async with Bus(redis_url, "test/before") as bus:
        said = RESPONSE_GENERATION.of(generation("1-1"), correlation_id="1-1")
        xadd, stream, _, *fields = bus.publishing(said)
        # a little more than an hour ago
        await bus.link.call(xadd, stream, f"{bus.now_ms() - 3_700_000}-0", *fields)
        async with court(redis_url) as on:
            await on.submit(generation("2-1"))
            await on.settled()
            assert [critique.query_id for critique in await on.critiques()] == ["2-1"]

            async def counted() -> bool:
                told = [info.facts for info in await Registry(bus, 0.0).replicas(fresh=True)]
                return any(facts.get("left_out_for") == {"backlog": 0, "age": 1} for facts in told)

            await eventually(counted, 20, "it is counted")


async def test_one_query_in_so_many_is_judged_as_a_whole(redis_url: str) -> None:
    async with court(redis_url, judge_one_in=3) as on:
        queries = [f"{n}-1" for n in range(1, 31)]
        await on.submit(*(generation(q, r) for q in queries for r in ("A", "B")))  # type: ignore[arg-type]
        await on.settled()
        graded = [(c.query_id, c.respondent_id) for c in await on.critiques()]
    judged = {query for query, _ in graded}
    assert 4 <= len(judged) <= 16
    assert sorted(graded) == sorted((q, r) for q in judged for r in ("A", "B"))


async def test_the_grade_and_the_verdict_come_into_the_journals_after_their_end(redis_url: str) -> None:
    async with court(redis_url) as on:
        writers = {}
        for respondent in ("A", "B"):
            writers[respondent], _ = await JournalWriter.claim(
                on.bus, journal_key("1-1", respondent), event_of("claimed", {}), 60
            )
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await asyncio.sleep(0.3)
        for writer in writers.values():
            await writer.append(event_of(EntryType.COMPLETED, {}))
        await on.settled()
        kinds = [[e.type.value for e in await read_journal(on.bus, journal_key("1-1", r))] for r in ("A", "B")]
    assert kinds == [["claimed", "completed", "critique", "pairwise"]] * 2


async def test_an_answer_delivered_twice_is_graded_and_compared_once(redis_url: str) -> None:
    async with court(redis_url, replicas=2) as on:
        for _ in range(3):
            await on.submit(generation("1-1"), generation("1-1", "B"))
        await on.settled()
        assert len(await on.critiques()) == 2
        assert len(await on.verdicts()) == 1


async def broken_off(on: Court, times: int = 1) -> None:
    """Returns when the handling of answers has failed so often."""

    async def failed() -> bool:
        actions = [one.action for one in await on.published(AGENT_TRANSITION) if one.agent == "critic"]
        return actions.count("FAIL") >= times

    await eventually(failed, 20, f"handling fails {times} times")


async def test_comparison_that_failed_halfway_is_made_by_the_next_delivery(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url) as on:
        # A value of another type in the place of the verdict makes every comparison fail.
        raw.rpush(verdict_key("1-1"), "damaged")
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await broken_off(on)
        assert await on.verdicts() == []
        raw.delete(verdict_key("1-1"))
        await on.settled()
        assert len(await on.verdicts()) == 1
        assert len(await on.critiques()) == 2


async def test_every_pair_has_one_judge_under_any_interleaving(redis_url: str) -> None:
    async with Bus(redis_url, "a") as first, Bus(redis_url, "b") as second:
        pools = (Pairs(first), Pairs(second))
        half = Half("r", "answer", "", 4, {}, "", "")
        offers = [(f"{n}-1", side) for n in range(50) for side in ("A", "B") for _ in range(3)]
        random.Random(7).shuffle(offers)
        judges: dict[str, set[str]] = {}

        async def offer(n: int, query: str, side: str) -> None:
            if (await pools[n % 2].offer(query, side, half, 1_000)).pair is not None:
                judges.setdefault(query, set()).add(side)

        await asyncio.gather(*(offer(n, query, side) for n, (query, side) in enumerate(offers)))
    assert len(judges) == 50
    assert all(len(sides) == 1 for sides in judges.values())


async def test_a_judgement_is_broken_off_for_a_users_query_and_made_again_when_that_is_answered(
    redis_url: str,
) -> None:
    slow = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Plain and right. [RESULT] 4", "pace": 0.5}}
    async with court(redis_url, [slow], grade_timeout=10) as on:
        # the generator's group is there, as in a running stack
        await on.bus.link.call("XGROUP", "CREATE", QUERY_RECEIVED.stream, "generator", "0", "MKSTREAM")
        await on.submit(generation("1-1"))
        await eventually(lambda: on.server.requests, 5, "the judgement begins")
        asked = await on.ask("What is the time?", "s9")
        await eventually(lambda: on.server.requests[0].outcome == "aborted", 2, "the judgement is broken off")
        await asyncio.sleep(0.5)
        assert len(on.server.requests) == 1
        on.server.set_rules([GRADE])
        await on.bus.link.call("XREADGROUP", "GROUP", "generator", "x", "STREAMS", QUERY_RECEIVED.stream, ">")
        await on.bus.link.call("XACK", QUERY_RECEIVED.stream, "generator", asked)
        await on.settled()
        (critique,) = await on.critiques()
    assert critique.score == 4


async def test_a_judge_does_not_wait_for_ever_for_a_busy_stack(redis_url: str) -> None:
    async with court(redis_url, yield_seconds=0.3) as on:
        await on.bus.link.call("XGROUP", "CREATE", QUERY_RECEIVED.stream, "generator", "0", "MKSTREAM")
        for n in range(3):
            await on.ask("What is the time?", f"s{n}")
        await on.submit(generation("1-1"))
        await on.settled()
        assert [c.score for c in await on.critiques()] == [4]


async def test_a_history_that_the_client_gave_is_told_to_the_judge(redis_url: str) -> None:
    history = [
        ChatTurnMessage(role="user", content="Tell me of Paris."),
        ChatTurnMessage(role="assistant", content="It is a city."),
        ChatTurnMessage(role="tool", content="nothing for a judge"),
    ]
    async with court(redis_url) as on:
        await on.submit(generation("1-1", history=history))
        await on.settled()
        prompt = on.server.requests[-1].body["messages"][-1]["content"]
    assert "User: Tell me of Paris.\nAssistant: It is a city.\n" in prompt
    assert "nothing for a judge" not in prompt


def comparisons(on: Court) -> int:
    """How often the judge was asked to compare."""
    return sum("###Response B:" in request.query for request in on.server.requests)


async def test_verdict_stored_before_a_failure_is_published_once(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url) as on:
        await on.submit(generation("1-1"))
        await on.settled()
        raw.rpush(journal_key("1-1", "A"), "damaged")
        await on.submit(generation("1-1", "B"))
        # It fails after the verdict is on the bus and before it is in the journals.
        await broken_off(on)
        assert len(await on.verdicts()) == 1
        raw.delete(journal_key("1-1", "A"))
        await on.settled()
        assert len(await on.verdicts()) == 1
        assert comparisons(on) == 2


async def test_grade_stored_before_failures_is_published_without_asking_again(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url) as on:
        raw.rpush(CRITIQUE_RESULT.stream, "damaged")
        await on.submit(generation("1-1"))
        await broken_off(on, 2)
        raw.delete(CRITIQUE_RESULT.stream)
        await on.settled()
        (critique,) = await on.critiques()
        assert len(on.server.requests) == 1
    assert (critique.score, critique.feedback) == (4, "Plain and right.")


async def test_nothing_that_judging_keeps_stays_for_ever(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url, retention=600) as on:
        # one whose counterpart never comes
        await on.submit(generation("1-1"))
        await on.settled()
        assert unending(raw) == []
        assert 0 < raw.ttl(pair_key("1-1")) <= 600
        assert 0 < raw.ttl(PAIRS_WAITING) <= 600
        # one that is compared, and one that cannot be
        await on.submit(generation("2-1"), generation("2-1", "B"), generation("3-1", answer=" "))
        await on.settled()
        assert len(await on.verdicts()) == 1
        assert unending(raw) == []
        for query_id in ("2-1", "3-1"):
            assert raw.hkeys(pair_key(query_id)) == [b"closed"]


async def test_verdict_reached_before_a_failure_is_published_after_it(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url) as on:
        raw.rpush(PAIRWISE_RESULT.stream, "damaged")
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await broken_off(on)
        raw.delete(PAIRWISE_RESULT.stream)
        await on.settled()
        (verdict,) = await on.verdicts()
    assert (verdict.winner, verdict.query_id_a, verdict.query_id_b) == ("tie", "1-1:A", "1-1:B")
    assert comparisons(on) == 2


async def test_answer_that_cannot_be_handled_is_published_as_not_graded(redis_url: str, raw: redis.Redis) -> None:
    for side in ("A", "B"):
        raw.rpush(grade_key(f"1-1:{side}"), "damaged")
    async with court(redis_url, max_deliveries=1) as on:
        await on.submit(generation("1-1"), generation("1-1", "B"))
        await on.settled()
        critiques = await on.critiques()
        assert [(c.response_id, c.score) for c in critiques] == [("1-1:A", None), ("1-1:B", None)]
        assert all(c.feedback.startswith("not graded: ") for c in critiques)
        assert await on.verdicts() == []
        steps = [one.action for one in await on.published(AGENT_TRANSITION) if one.query_id == "1-1"]
        assert steps[:4] == ["RECEIVE", "GRADE", "FAIL", "RESET"]
    assert raw.hkeys(pair_key("1-1")) == [b"closed"]
    assert raw.zcard(PAIRS_WAITING) == 0


async def test_nothing_comes_of_an_answer_whose_query_was_taken_back(redis_url: str, raw: redis.Redis) -> None:
    slow = {"when": {"user": "###Score Rubrics"}, "respond": {"text": "Plain and right. [RESULT] 4", "pace": 0.3}}
    async with court(redis_url, [slow], grade_timeout=20) as on:
        await on.sessions.take_back(["1-1"])
        await on.submit(generation("1-1"))
        await on.settled()
        assert on.server.requests == []
        # The second query is taken back while the judge reads.
        await on.submit(generation("2-1"))
        await eventually(lambda: on.server.requests, 5, "the judgement begins")
        await on.sessions.take_back(["2-1"])
        await on.settled()
        assert await on.critiques() == []
        steps = [(one.query_id, one.action) for one in await on.published(AGENT_TRANSITION) if one.agent == "critic"]
    assert steps == [("1-1", "RECEIVE"), ("1-1", "SKIP"), ("2-1", "RECEIVE"), ("2-1", "GRADE"), ("2-1", "RESET")]
    assert (raw.exists(grade_key("2-1:A")), raw.exists(pair_key("2-1"))) == (0, 0)


async def test_answer_that_failed_twice_is_judged_before_all_others(redis_url: str, raw: redis.Redis) -> None:
    async with court(redis_url, max_deliveries=20) as on:
        raw.rpush(grade_key("1-1:A"), "damaged")
        await on.submit(generation("1-1"))
        await broken_off(on, 2)
        async with busy(on):
            await on.submit(generation("2-1"), generation("3-1"))
            await in_line(on, 3)
            raw.delete(grade_key("1-1:A"))
        await on.settled()
        assert [one.query_id for one in await on.critiques()] == ["1-1", "3-1", "2-1"]


async def test_answers_are_compared_by_the_rubric_of_the_first(redis_url: str) -> None:
    call = ToolCallRecord(tool="web_search", args={}, result="found", call_id="c")
    async with court(redis_url, skip_tool_answers=False) as on:
        await on.submit(generation("1-1", tool_calls=[call]))
        await on.settled()
        await on.submit(generation("1-1", "B"))
        await on.settled()
        prompts = [request.body["messages"][-1]["content"] for request in on.server.requests]
    rubrics = load_rubrics(None)
    graded_a, graded_b, *compared = prompts
    criteria = {name: rubrics[name].text.splitlines()[0].strip("[]") for name in ("style", "realistic")}
    assert criteria["style"] in graded_a
    assert criteria["realistic"] in graded_b
    assert len(compared) == 2
    assert all(criteria["style"] in prompt and criteria["realistic"] not in prompt for prompt in compared)


async def test_the_critic_tells_its_steps(redis_url: str) -> None:
    async with court(redis_url) as on:
        await on.submit(generation("1-1"))
        await on.settled()
        await on.submit(generation("1-1", "B"), generation("2-1", answer=" "))
        await on.settled()
        steps = [(one.query_id, one.action) for one in await on.published(AGENT_TRANSITION) if one.agent == "critic"]
    assert [action for query_id, action in steps if query_id == "1-1"] == [
        "RECEIVE", "GRADE", "PUBLISH", "RESET", "RECEIVE", "GRADE", "PUBLISH", "COMPARE", "PUBLISH", "RESET",
    ]  # fmt: skip
    assert [action for query_id, action in steps if query_id == "2-1"] == ["RECEIVE", "SKIP"]


async def test_a_grade_that_cannot_be_read_any_more_is_given_anew(redis_url: str, raw: redis.Redis) -> None:
    raw.set(grade_key("1-1:A"), b"{")
    raw.set(grade_key("2-1:A"), b'{"colour": "red"}')
    async with court(redis_url) as on:
        await on.submit(generation("1-1"), generation("2-1"))
        await on.settled()
        assert [critique.score for critique in await on.critiques()] == [4, 4]


async def test_several_judges_are_told_each_and_what_they_come_to(redis_url: str) -> None:
    def of(model: str, rule: dict[str, Any]) -> dict[str, Any]:
        return {**rule, "when": {**rule["when"], "model": f"^{model}"}}

    rules = [of(model, rule) for model in ("one", "two") for rule in PREFERS_GOOD] + [of("three", PREFERS_FIRST)]
    for model, grade in (("one", 5), ("two", 2), ("three", 4)):
        said = {"text": f"Grade {grade}. [RESULT] {grade}"}
        rules.append(of(model, {"when": {"user": "###Score Rubrics"}, "respond": said}))
    async with court(redis_url, judges=["one", "two", "three", "gone"]) as on:
        on.server.set_rules(Script.model_validate({"models": {"one": [], "two": [], "three": []}, "rules": rules}))
        writers = [
            (await JournalWriter.claim(on.bus, journal_key("1-1", side), event_of("claimed", {}), 60))[0]
            for side in ("A", "B")
        ]
        for writer in writers:
            await writer.append(event_of(EntryType.COMPLETED, {}))
        await on.submit(generation("1-1"), generation("1-1", "B", "bad"))
        await on.settled()
        critique, _ = await on.critiques()
        (verdict,) = await on.verdicts()
        journal = [entry.value() for entry in await read_journal(on.bus, journal_key("1-1", "A"))]

        async def told() -> bool:
            shown = [info.facts for info in await Registry(on.bus, 0.0).replicas(fresh=True)]
            return any(
                [(one["model"], one["ok"]) for one in facts.get("judges", ())]
                == [("one", True), ("two", True), ("three", True), ("gone", False)]
                and facts["backend_ok"]
                for facts in shown
            )

        await eventually(told, 20, "the registry names each")
    assert (critique.score, critique.feedback) == (4, "Grade 4.")
    assert [(each.model, each.score) for each in critique.judges] == [
        ("one", 5), ("two", 2), ("three", 4), ("gone", None),
    ]  # fmt: skip
    assert critique.judges[-1].feedback.startswith("not asked: ")
    # the third likes whatever stands first
    assert (verdict.winner, verdict.forward, verdict.swapped) == ("A", "A", "A")
    assert [each.winner for each in verdict.judges] == ["A", "A", "tie", None]
    assert [each["model"] for each in journal[-2]["judges"]] == ["one", "two", "three", "gone"]
    assert [each["winner"] for each in journal[-1]["judges"]] == ["A", "A", "tie", None]
