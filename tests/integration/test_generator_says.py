"""What models say in their own way never reaches the user: printed calls are run, loops are ended, repetitions told."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from support.printed_forms import FORMS, PROSE
from support.stack import Stage, shown, stage

from services.generator.loop import ANSWER_NOW, REPEATED
from shared.records.journal import EntryType, JournalEntry

DONE: dict[str, Any] = {"respond": {"text": "It is done."}}
# The forms that ask for one thing, as calls of the tool that is alive here.
CALLS = {
    form.name: form.text.replace("web_search", "probe").replace("WebSearch", "Probe").replace("query", "text")
    for form in FORMS
    if form.calls == [("web_search", {"query": "x"})]
}


def answers(entries: list[JournalEntry]) -> str:
    """All text that any client ever saw of an answer, void or not."""
    return "".join(entry.value()["text"] for entry in entries if entry.type is EntryType.ANSWER)


def notices(entries: list[JournalEntry]) -> list[str]:
    return [entry.value()["code"] for entry in entries if entry.type is EntryType.NOTICE]


async def results(on: Stage, query_id: str) -> list[str]:
    return [e.value()["tool"] for e in await on.journal(query_id) if e.type is EntryType.TOOL_RESULT]


async def test_every_printed_form_runs_the_tool_and_ends_in_prose(redis_url: str) -> None:
    rules: list[dict[str, Any]] = [
        {"when": {"user": f"^form {n}$", "tool_results": 0}, "respond": {"text": text}}
        for n, text in enumerate(CALLS.values())
    ]
    assert len(CALLS) >= 70
    failed = {}
    # no tool may seem to be away for a moment: its call would be taken for text
    async with stage(redis_url, [*rules, DONE], probes=1) as on:
        for n, name in enumerate(CALLS):
            query_id = await on.ask(f"form {n}", f"s{n}")
            said = await on.answer(query_id)
            journal = await on.journal(query_id)
            (turn,) = await on.turns(f"s{n}")
            if said != "It is done." or turn.answer != said or "probe" in answers(journal).casefold():
                failed[name] = (said, answers(journal))
        ran = await on.effects()
    assert failed == {}
    assert ran == {"x": len(CALLS)}


async def test_prose_that_resembles_a_call_is_the_answer_and_runs_nothing(redis_url: str) -> None:
    cases = [case for case in PROSE if "<<" not in case.text]
    rules = [{"when": {"user": f"^{n}: "}, "respond": {"text": [case.text]}} for n, case in enumerate(cases)]
    async with stage(redis_url, rules, probes=1) as on:
        for n, case in enumerate(cases):
            query_id = await on.ask(f"{n}: {case.question}")
            assert await on.answer(query_id) == case.text
            assert await results(on, query_id) == []


async def test_a_call_printed_after_the_last_round_is_neither_run_nor_the_answer(redis_url: str) -> None:
    rules: list[dict[str, Any]] = [
        {"when": {"result": "no tool call is left for this question"}, "respond": {"text": "What I know: nothing."}},
        {
            "when": {"tool_results": 1},
            "respond": {"text": '```json\n{"name": "probe", "arguments": {"text": "two"}}\n```'},
        },
        {"respond": {"text": '{"name": "probe", "arguments": {"text": "one"}}'}},
    ]
    async with stage(redis_url, rules, probes=1, max_tool_iterations=1) as on:
        query_id = await on.ask("go", "s1")
        assert await on.answer(query_id) == "What I know: nothing."
        assert "probe" not in answers(await on.journal(query_id))
        assert await on.effects() == {"one": 1}
        bodies = [request.body for request in on.server.requests]
        (turn,) = await on.turns("s1")
    # the prompt cache lives of a request that only grows
    assert all(body["tools"] == bodies[0]["tools"] for body in bodies)
    for earlier, later in pairwise(bodies):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
    assert bodies[1]["messages"][-1]["content"].endswith(ANSWER_NOW)
    assert turn.answer == "What I know: nothing."


async def test_a_model_that_only_prints_calls_ends_with_a_reason_and_stores_no_turn(redis_url: str) -> None:
    printed = {"respond": {"text": '{"name": "probe", "arguments": {"text": "<<query>>"}}'}}
    async with stage(redis_url, [printed], probes=1) as on:
        query_id = await on.ask("go", "s1")
        end = await on.ended(query_id)
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "model_error")
        assert "asked for tools until none was left" in end.value()["message"]
        assert answers(await on.journal(query_id)) == ""
        assert await on.effects() == {"go": 1}
        assert await on.turns("s1") == []
        assert len(on.server.requests) == 4


async def test_a_repeated_call_is_told_where_its_result_stands(redis_url: str) -> None:
    call = {"name": "probe", "args": {"text": "same"}}
    rules: list[dict[str, Any]] = [
        {"when": {"tool_results": 0}, "respond": {"tool_calls": [call]}},
        {"when": {"tool_results": 1}, "respond": {"tool_calls": [call]}},
        DONE,
    ]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert await on.effects() == {"same": 1}
        told = [m["content"] for m in on.server.requests[-1].body["messages"] if m["role"] == "tool"]
        assert all(request.body["tools"] for request in on.server.requests)
    assert len(told) == 2
    assert told[1].startswith(REPEATED)


async def test_an_answer_that_goes_in_circles_is_cut_back_and_the_user_told_why(redis_url: str) -> None:
    text = "It is Paris.\n" + "I am not quite sure about that. " * 2_000
    async with stage(redis_url, [{"respond": {"text": text, "thinking": "hm"}}]) as on:
        query_id = await on.ask("go", "s1")
        said = await on.answer(query_id)
        journal = await on.journal(query_id)
        (turn,) = await on.turns("s1")
        await on.server.wait_until(lambda server: server.streaming == 0)
    assert said == "It is Paris.\nI am not quite sure about that."
    assert shown(journal) == turn.answer == said
    assert shown(journal, EntryType.THINKING) == "hm"
    assert notices(journal) == ["model_loops"]


async def test_thoughts_that_go_in_circles_are_ended_and_the_answer_comes_without(redis_url: str) -> None:
    rule = {"respond": {"thinking": "Wait, let me check that again. " * 2_000, "text": "It is Paris."}}
    async with stage(redis_url, [rule]) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is Paris."
        assert [request.body["think"] for request in on.server.requests] == [True, False]
