"""A committee on a real bus: who speaks, what each is told, and what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from pydantic import BaseModel
from support.services import announced, running
from support.stack import stage
from support.waiting import eventually

from services.generator.identities import load_identities
from shared.contracts import AGENT_TRANSITION, RESPONSE_GENERATION
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.records.journal import EntryType, JournalEntry
from shared.testing.script import Script


class SearchMemory(BaseModel):
    """A memory that says what it was asked. Call it in tests."""

    query: str
    do_rerank: bool = False


@contextlib.asynccontextmanager
async def _open_memory(_settings: Settings) -> AsyncIterator[Run[SearchMemory]]:
    async def run(args: SearchMemory) -> ToolResult:
        return ToolResult(f"{args.query}: {'a few that fit' if args.do_rerank else 'many'}")

    yield run


@contextlib.asynccontextmanager
async def memory(redis_url: str) -> AsyncIterator[None]:
    """A search_memory that is alive."""
    service = tool_service("search_memory", SearchMemory, Settings, _open_memory)
    async with running(service, Settings(redis_url=redis_url, heartbeat=0.2, drain=0.2)):
        await announced(redis_url, "search_memory", 1)
        yield


def saying(text: str, **when: Any) -> dict[str, Any]:
    return {"times": 1, **({"when": when} if when else {}), "respond": {"text": text}}


def spent(journal: Sequence[JournalEntry]) -> list[int]:
    """Tokens of the prompt of each finished call of the model."""
    return [entry.value()["prompt_tokens"] for entry in journal if entry.type is EntryType.MESSAGE]


async def test_members_speak_in_turn_and_the_self_who_has_heard_them_answers(redis_url: str) -> None:
    rules = [saying("Doubt one."), saying("Warmth one."), saying("Doubt two."), saying("Warmth two."), saying("So.")]
    async with stage(redis_url, rules, temperature=0.3) as on:
        query_id = await on.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"], rounds=2)
        assert await on.answer(query_id) == "So."
        requests = [request.body for request in on.server.requests]
        journal = await on.journal(query_id)
        (generation,) = await on.published(RESPONSE_GENERATION, query_id)
        assert [turn.answer for turn in await on.turns("s1")] == ["So."]
    identities = load_identities(None)
    prompts = [body["messages"][0]["content"] for body in requests]
    for prompt, persona in zip(prompts, ("Skeptic", "Empath", "Skeptic", "Empath"), strict=False):
        assert identities.personas[persona] in prompt
        assert identities.self_identity not in prompt
    # each hears those before
    said = ["Doubt one.", "Warmth one.", "Doubt two.", "Warmth two."]
    for number, prompt in enumerate(prompts):
        assert [text in prompt for text in said] == [n < number for n in range(4)], number
    assert identities.self_identity in prompts[-1]
    assert on.settings.system_prompt in prompts[-1]
    assert on.settings.system_prompt not in prompts[0]
    assert all(body["messages"][-1] == {"role": "user", "content": "Shall I?"} for body in requests)
    assert {body["options"]["temperature"] for body in requests} == {0.3}
    told = [
        (entry.type.value, entry.value()["persona"], entry.value()["round"])
        for entry in journal
        if entry.type in (EntryType.PERSONA_WORKING, EntryType.PERSONA_DONE)
    ]
    assert told == [
        (kind, who, number)
        for number in (1, 2)
        for who in ("Skeptic", "Empath")
        for kind in ("persona.working", "persona.done")
    ]
    done = [entry.value()["response"] for entry in journal if entry.type is EntryType.PERSONA_DONE]
    assert done == said
    assert [(one.persona, one.response) for one in generation.deliberations] == [
        ("Skeptic", "Doubt one."), ("Empath", "Warmth one."), ("Skeptic", "Doubt two."), ("Empath", "Warmth two."),
    ]  # fmt: skip
    assert journal[-1].value()["deliberations"] == [one.model_dump(mode="json") for one in generation.deliberations]


async def test_the_settings_say_who_speaks_when_nobody_is_named(redis_url: str) -> None:
    async with stage(redis_url, rounds=2, active_personas=["the_exile", "ANALYST"], order=["analyst"]) as on:
        query_id = await on.ask("Shall I?", "s1", mode="committee")
        await on.answer(query_id)
        journal = await on.journal(query_id)
    who = [entry.value()["persona"] for entry in journal if entry.type is EntryType.PERSONA_DONE]
    assert who == ["Analyst", "The Exile"] * 2


async def test_a_committee_of_nobody_is_an_ordinary_answer(redis_url: str) -> None:
    async with stage(redis_url, active_personas=[]) as on:
        asked = [
            await on.ask("Shall I?", mode="committee"),
            await on.ask("Shall I?", mode="committee", personas=[]),
            await on.ask("Shall I?"),
        ]
        for query_id in asked:
            await on.answer(query_id)
        prompts = [request.body["messages"] for request in on.server.requests]
        assert prompts[0] == prompts[1] == prompts[2]
        assert "deliberations" not in (await on.journal(asked[0]))[-1].value()


async def test_members_search_memory_for_few_that_fit_and_three_times_at_most(redis_url: str) -> None:
    def look(number: int) -> dict[str, Any]:
        call = {"name": "search_memory", "args": {"query": f"life {number}"}}
        return {"when": {"tool_results": number}, "times": 1, "respond": {"tool_calls": [call]}}

    rules = [*(look(number) for number in range(3)), saying("I doubt it."), saying("So.")]
    async with memory(redis_url), stage(redis_url, rules, tool_timeout=10) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["skeptic"])
        assert await on.answer(query_id) == "So."
        (generation,) = await on.published(RESPONSE_GENERATION, query_id)
        messages = on.server.requests[3].body["messages"]
        transitions = [step.action for step in await on.published(AGENT_TRANSITION, query_id)]
        spoken = [entry.value() for entry in await on.journal(query_id) if entry.type is EntryType.MESSAGE]
    (said,) = generation.deliberations
    assert [trace.args for trace in said.tool_trace] == [
        {"do_rerank": True, "query": f"life {number}"} for number in range(3)
    ]
    assert [trace.result_preview for trace in said.tool_trace] == [f"life {n}: a few that fit" for n in range(3)]
    assert "No tool call is left for this question" in messages[-1]["content"]
    assert transitions.count("DISPATCH_TOOL") == 3
    # what a member did is no call of the answer's
    assert generation.tool_calls == []
    assert len(spoken) == 5
    assert generation.usage.prompt_tokens == sum(message["prompt_tokens"] for message in spoken) > 0


@pytest.mark.parametrize("name", ["search_memory", "search_memories", "recall_memory", "memory_recall"])
@pytest.mark.parametrize("asked", [{"mode": "committee", "personas": ["skeptic"]}, {"tools": ["recall_memory"]}])
async def test_older_name_of_a_listed_tool_is_called(redis_url: str, asked: dict[str, Any], name: str) -> None:
    rules = [
        {"when": {"tool_results": 0}, "times": 1, "respond": {"tool_calls": [{"name": name, "args": {"query": "x"}}]}},
        saying("I found <<result>>."),
        saying("So."),
    ]
    async with memory(redis_url), stage(redis_url, rules, tool_timeout=10) as on:
        query_id = await on.ask("Shall I?", **asked)
        await on.answer(query_id)
        result = await on.seen(query_id, EntryType.TOOL_RESULT)
        offered = [tool["function"]["name"] for tool in on.server.requests[0].body["tools"]]
    assert (result.value()["tool"], result.value()["error"]) == ("search_memory", None)
    assert offered == ["search_memory"]


async def test_members_that_speak_at_once_use_tools_beside_each_other(redis_url: str) -> None:
    call = {"name": "search_memory", "args": {"query": "life"}}
    rules = [
        {"when": {"system": "=== INNER COMMITTEE"}, "respond": {"text": "So."}},
        {"when": {"tool_results": 0}, "respond": {"tool_calls": [call]}},
        {"respond": {"text": "I found <<result>>."}},
    ]
    async with memory(redis_url), stage(redis_url, rules, parallel=True, tool_timeout=10) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["skeptic", "empath"], rounds=1)
        assert await on.answer(query_id) == "So."
        journal = await on.journal(query_id)
        steps = [(step.from_state, step.to) for step in await on.published(AGENT_TRANSITION, query_id)]
    asked = [entry.value() for entry in journal if entry.type is EntryType.TOOL_REQUEST]
    assert sorted(one["persona"] for one in asked) == ["Empath", "Skeptic"]
    assert [(said["persona"], said["response"]) for said in journal[-1].value()["deliberations"]] == [
        ("Skeptic", "I found life: a few that fit."), ("Empath", "I found life: a few that fit."),
    ]  # fmt: skip
    # no state is the query's while several speak
    assert steps == [
        ("IDLE", "RECEIVING"), ("RECEIVING", "GENERATING"), ("GENERATING", "PUBLISHING"), ("PUBLISHING", "IDLE"),
    ]  # fmt: skip


async def test_a_model_that_cannot_call_tools_is_told_what_memory_holds(redis_url: str) -> None:
    script = Script.model_validate({"rules": [], "models": {"plain": ["thinking"]}})
    async with memory(redis_url), stage(redis_url, script, model="plain", tool_timeout=10) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["skeptic", "empath"], rounds=1)
        await on.answer(query_id)
        journal = await on.journal(query_id)
        prompts = [r.body["messages"][0]["content"] for r in on.server.requests if r.outcome == "done"]
    held = "=== RETRIEVED CONTEXT ===\nShall I?: a few that fit"
    # the first member speaks again
    assert [held in prompt for prompt in prompts] == [False, True, True, True]
    # and its words are paid for twice
    assert len(spent(journal)) == 4
    assert journal[-1].value()["usage"]["prompt_tokens"] == sum(spent(journal))


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_cancel_stops_whoever_speaks_and_leaves_no_turn(parallel: bool, redis_url: str) -> None:
    stalled = {"respond": {"text": "one two three", "fault": {"kind": "stall", "after": 2}}}
    rules = [stalled] if parallel else [saying("I doubt it."), stalled]
    async with stage(redis_url, rules, parallel=parallel) as on:
        query_id = await on.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"])
        await on.seen(query_id, EntryType.ANSWER, persona="Empath")
        await on.server.wait_until(lambda server: server.streaming == (2 if parallel else 1))
        await on.cancel(query_id)
        end = await on.ended(query_id)
        await on.server.wait_until(lambda server: server.streaming == 0)
        assert (end.type, end.value()["answer"]) == (EntryType.CANCELLED, "")
        assert await on.turns("s1") == []
        assert await on.published(RESPONSE_GENERATION) == []
        # what was spent is told all the same
        assert len(spent(await on.journal(query_id))) == (0 if parallel else 1)
        assert end.value()["usage"]["prompt_tokens"] == sum(spent(await on.journal(query_id)))


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_cancel_ends_what_members_have_asked_of_tools_and_the_next_question_is_answered(
    parallel: bool, redis_url: str
) -> None:
    running_now: list[str] = []

    @contextlib.asynccontextmanager
    async def slow(_settings: Settings) -> AsyncIterator[Run[SearchMemory]]:
        async def run(args: SearchMemory) -> ToolResult:
            running_now.append(args.query)
            try:
                await asyncio.sleep(60)
            finally:
                running_now.remove(args.query)
            return ToolResult("nothing")

        yield run

    call = {"name": "search_memory", "args": {"query": "life"}}
    rules = [
        {"when": {"user": "^Next"}, "respond": {"text": "Gladly."}},
        # in the second round
        {"when": {"system": "\\[Empath, round 1\\]", "tool_results": 0}, "respond": {"tool_calls": [call]}},
        {"respond": {"text": "I doubt it."}},
    ]
    service = tool_service("search_memory", SearchMemory, Settings, slow)
    async with (
        running(service, Settings(redis_url=redis_url, heartbeat=0.2, drain=0.2)),
        stage(redis_url, rules, parallel=parallel, tool_timeout=60) as on,
    ):
        await announced(redis_url, "search_memory", 1)
        query_id = await on.ask("Shall I?", "s1", mode="committee", personas=["skeptic", "empath"], rounds=2)
        await eventually(lambda: len(running_now) == (2 if parallel else 1), what="members wait for a tool")
        await on.cancel(query_id)
        assert (await on.ended(query_id, 1.0)).type is EntryType.CANCELLED
        await eventually(lambda: not running_now, what="no tool runs for them")
        told = [entry.value() for entry in await on.journal(query_id) if entry.type is EntryType.PERSONA_DONE]
        assert [(one["persona"], one["round"]) for one in told] == [("Skeptic", 1), ("Empath", 1)]
        assert await on.answer(await on.ask("Next?", "s1")) == "Gladly."
        assert [turn.answer for turn in await on.turns("s1")] == ["Gladly."]


async def test_the_deadline_is_that_of_the_whole_committee(redis_url: str) -> None:
    stalled = {"respond": {"text": "x", "fault": {"kind": "stall"}}}
    async with stage(redis_url, [saying("I doubt it."), stalled]) as on:
        query_id = await on.ask("Shall I?", "s1", deadline=2.0, mode="committee", personas=["skeptic", "empath"])
        end = await on.ended(query_id)
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "deadline_exceeded")
        await on.server.wait_until(lambda server: server.streaming == 0)


async def test_an_unknown_member_is_told_by_its_name(redis_url: str) -> None:
    async with stage(redis_url) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["pirate", "empath", "clown"])
        end = await on.ended(query_id)
        assert on.server.requests == []
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "unknown_persona")
    assert end.value()["message"].startswith("unknown personas: clown, pirate; there are ")


@pytest.mark.parametrize(
    ("tools", "offered"),
    [(None, ["search_memory"]), (["probe"], []), (["probe", "search_memory"], ["search_memory"])],
    ids=["any", "probe", "both"],
)
async def test_members_are_offered_the_allowed_tools_of_memory(
    tools: list[str] | None, offered: list[str], redis_url: str
) -> None:
    async with memory(redis_url), stage(redis_url, probes=1) as on:
        query_id = await on.ask("Shall I?", mode="committee", personas=["skeptic"], rounds=1, tools=tools)
        await on.answer(query_id)
        member, final = (request.body for request in on.server.requests)
    assert [tool["function"]["name"] for tool in member.get("tools", [])] == offered
    assert "probe" in [tool["function"]["name"] for tool in final["tools"]]
