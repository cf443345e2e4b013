"""What models and tools do wrong, over real HTTP and a real bus: the query ends well, or says why it cannot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.apps import ProbeSettings, probe
from support.services import announced, running
from support.stack import shown, stage
from support.waiting import always, eventually

from shared.contracts import RESPONSE_GENERATION
from shared.records.journal import EntryType
from shared.testing.model_server import ScriptedModelServer

DONE: dict[str, Any] = {"respond": {"text": "It is done."}}
LONG = "one two three four five six"


def calling(**call: Any) -> dict[str, Any]:
    return {"when": {"tool_results": 0}, "respond": {"tool_calls": [{"name": "probe", **call}]}}


def broken(kind: str, after: int, times: int = 1, **fault: Any) -> dict[str, Any]:
    respond = {"thinking": "hm", "text": LONG, "pace": 0.03, "fault": {"kind": kind, "after": after, **fault}}
    return {"times": times, "respond": respond}


async def test_think_tags_that_are_split_over_chunks_become_thinking(redis_url: str) -> None:
    chunks = ["<th", "ink>I wo", "nder</thi", "nk>The ans", "wer."]
    async with stage(redis_url, [{"respond": {"text": chunks}}], think=False) as on:
        query_id = await on.ask("go", "s1")
        assert await on.answer(query_id) == "The answer."
        journal = await on.journal(query_id)
        (turn,) = await on.turns("s1")
    assert shown(journal) == turn.answer == "The answer."
    assert shown(journal, EntryType.THINKING) == "I wonder"


async def test_arguments_as_json_text_and_a_missing_id_make_a_proper_call(redis_url: str) -> None:
    rules = [calling(text_arguments='{"text": "from text"}', id=""), DONE]
    async with stage(redis_url, rules, probes=1) as on:
        await on.answer(await on.ask("go"))
        assert await on.effects() == {"from text": 1}
        said, told = on.server.requests[-1].body["messages"][-2:]
    assert told["tool_call_id"] == said["tool_calls"][0]["id"] != ""
    assert said["tool_calls"][0]["function"]["arguments"] == {"text": "from text"}


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("no_such_tool", {"x": 1}, "[unknown tool: 'no_such_tool']"),
        ("probe", {"text": "a", "fail": "engine on fire"}, "[tool error: engine on fire]"),
        ("probe", {}, "[tool error: missing text argument]"),
    ],
)
async def test_what_goes_wrong_with_a_tool_is_a_text_for_the_model(
    redis_url: str, name: str, args: dict[str, Any], text: str
) -> None:
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": [{"name": name, "args": args}]}}, DONE]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert on.server.requests[-1].body["messages"][-1]["content"] == text
        result = await on.seen(query_id, EntryType.TOOL_RESULT)
    assert result.value()["result"] == text
    assert result.value()["error"]


async def test_a_tool_that_takes_too_long_is_a_text_for_the_model(redis_url: str) -> None:
    rules = [calling(args={"text": "slow", "seconds": 30}), DONE]
    async with stage(redis_url, rules, probes=1, tool_timeout=0.3) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert on.server.requests[-1].body["messages"][-1]["content"] == "[tool timeout after 0.3s]"
        states = [e.value()["action"] for e in await on.journal(query_id) if e.type is EntryType.STATE]
    assert "TOOL_TIMEOUT" in states


async def test_tool_timeout_bounds_a_tool_that_announces_more(redis_url: str) -> None:
    rules = [calling(args={"text": "slow", "seconds": 30}), DONE]
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, drain=0.2, timeout=30.0)
    async with running(probe, settings):
        await announced(redis_url, "probe")
        async with stage(redis_url, rules, tool_timeout=0.3) as on:
            query_id = await on.ask("go")
            assert await on.answer(query_id) == "It is done."
            result = await on.seen(query_id, EntryType.TOOL_RESULT)
            # The worker ends the call as well.
            await eventually(lambda: on.bus.link.call("HGET", "ended", "slow"))
    assert result.value()["result"] == "[tool timeout after 0.3s]"


async def test_limit_of_tool_rounds_is_logged_with_its_query(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = [{"when": {"tool_results": n}, "respond": {"tool_calls": [{"name": "probe", "args": {"text": f"{n}"}}]}}
              for n in range(2)]  # fmt: skip
    async with stage(redis_url, [*asking, DONE], probes=1, max_tool_iterations=2) as on:
        query_id = await on.ask("go")
        await on.answer(query_id)
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "agent.tool_limit_reached" in line]
    assert [(line["level"], line["query_id"], line["limit"]) for line in logged] == [("warning", query_id, 2)]


async def test_a_query_taken_over_before_its_tools_worker_is_there_waits_for_it(redis_url: str) -> None:
    """The whole stack was stopped while a tool ran, and in the one that starts the generator is first."""
    rules = [calling(args={"text": "slow", "seconds": 1.0}), DONE]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        await on.seen(query_id, EntryType.TOOL_REQUEST)
    settings = ProbeSettings(redis_url=redis_url, heartbeat=0.2, drain=0.2)
    async with stage(redis_url, rules) as on:

        async def taken_over() -> bool:
            return sum(e.type is EntryType.CLAIMED for e in await on.journal(query_id)) == 2

        await eventually(taken_over)
        await always(lambda: not on.server.requests, 0.3)
        async with running(probe, settings):
            assert await on.answer(query_id) == "It is done."
        assert "you said slow" in on.server.requests[-1].body["messages"][-1]["content"]


async def test_a_tool_without_a_live_worker_is_answered_at_once(redis_url: str) -> None:
    rules = [calling(args={"text": "a"}), DONE]
    async with stage(redis_url, rules, probes=1) as on:
        await on.answer(await on.ask("go"))
    async with stage(redis_url, rules) as on:
        query_id = await on.ask("go")
        await on.answer(query_id)
        assert on.server.requests[-1].body["messages"][-1]["content"] == "[tool unavailable]"
        journal = await on.journal(query_id)
    request, result = (e for e in journal if e.type in (EntryType.TOOL_REQUEST, EntryType.TOOL_RESULT))
    assert result.time - request.time < 500


@pytest.mark.parametrize(("lacks", "has"), [("tools", ["thinking"]), ("thinking", ["tools"])])
async def test_a_model_that_lacks_an_ability_answers_without_it_and_the_journal_says_so(
    redis_url: str, lacks: str, has: list[str]
) -> None:
    async with stage(redis_url, probes=1) as on:
        on.server.director.script.models = {"gemma4:e4b": has}
        query_id = await on.ask("go", "s1")
        assert await on.answer(query_id) == "You asked: go"
        notice = await on.seen(query_id, EntryType.NOTICE)
        # the next answers of the conversation do not repeat it
        again = await on.ask("on", "s1")
        assert await on.answer(again) == "You asked: on"
        assert "notice" not in await on.types(again)
    assert notice.value()["code"] == f"{lacks}_unsupported"
    assert notice.value()["message"]


@pytest.mark.parametrize(
    "fault", [broken("cut", 4), broken("no_done", 4), broken("garbage", 4), broken("error_line", 4, text="crashed")]
)
async def test_an_answer_that_breaks_off_is_begun_again_and_clients_know_what_to_discard(
    redis_url: str, fault: dict[str, Any]
) -> None:
    async with stage(redis_url, [fault, {"respond": {"thinking": "hm", "text": LONG}}]) as on:
        query_id = await on.ask("go", "s1")
        assert await on.answer(query_id) == LONG
        journal = await on.journal(query_id)
        (turn,) = await on.turns("s1")
        assert len(await on.published(RESPONSE_GENERATION)) == 1
    assert [e.type for e in journal].count(EntryType.RESTARTED) == 1
    everything = "".join(e.value()["text"] for e in journal if e.type is EntryType.ANSWER)
    assert len(everything) > len(LONG)
    assert shown(journal) == turn.answer == LONG
    assert shown(journal, EntryType.THINKING).strip() == "hm"


async def test_an_answer_that_always_breaks_off_fails_after_three_tries(redis_url: str) -> None:
    async with stage(redis_url, [broken("cut", 3, times=99)]) as on:
        query_id = await on.ask("go", "s1")
        end = await on.ended(query_id)
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "model_error")
        assert len(on.server.requests) == 3
        assert await on.turns("s1") == []
        # the session goes on
        on.server.set_rules([DONE])
        assert await on.answer(await on.ask("again", "s1")) == "It is done."


async def test_a_busy_model_is_asked_again(redis_url: str) -> None:
    busy = {"times": 2, "respond": {"status": 503, "error": "server busy, please try again"}}
    async with stage(redis_url, [busy, DONE]) as on:
        assert await on.answer(await on.ask("go")) == "It is done."
        assert [r.outcome for r in on.server.requests] == ["refused", "refused", "done"]


async def test_a_missing_model_fails_with_the_command_that_gets_it(redis_url: str) -> None:
    async with stage(redis_url) as on:
        on.server.director.script.models = {"other": ["tools"]}
        end = await on.ended(await on.ask("go", "s1"))
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "model_missing")
    assert "ollama pull gemma4:e4b" in end.value()["message"]


async def test_a_refused_request_fails_with_what_the_backend_said(redis_url: str) -> None:
    async with stage(redis_url, [{"respond": {"status": 400, "error": "invalid option: foo"}}]) as on:
        end = await on.ended(await on.ask("go"))
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "model_rejected")
    assert "invalid option" in end.value()["message"]


async def test_a_model_that_says_nothing_is_asked_again_without_tools(redis_url: str) -> None:
    rules = [{"when": {"any_tools": True}, "respond": {"thinking": "hm", "text": ""}}, DONE]
    async with stage(redis_url, rules, probes=1) as on:
        assert await on.answer(await on.ask("go")) == "It is done."


async def test_a_model_that_never_says_anything_fails(redis_url: str) -> None:
    async with stage(redis_url, [{"respond": {"text": ""}}], probes=1) as on:
        end = await on.ended(await on.ask("go"))
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "model_error")


async def test_a_query_completes_when_the_model_server_comes_back(redis_url: str) -> None:
    async with ScriptedModelServer() as reserved:
        port = int(reserved.url.rpartition(":")[2])
    async with stage(redis_url, ollama_host=f"http://127.0.0.1:{port}") as on:
        query_id = await on.ask("go")
        # the client is told, once, why nothing comes
        notice = await on.seen(query_id, EntryType.NOTICE, code="model_waiting")
        assert "Ollama does not answer" in notice.value()["message"]
        await asyncio.sleep(0.5)
        async with ScriptedModelServer([DONE], port=port):
            assert await on.answer(query_id) == "It is done."
        assert (await on.types(query_id)).count("notice") == 1


async def test_an_answer_that_is_too_late_says_what_it_waited_for(redis_url: str) -> None:
    busy, there = {"respond": {"status": 503, "error": "all is taken"}}, {"respond": {"text": "slow", "delay": 9}}
    async with stage(redis_url, [{**busy, "when": {"user": "busy"}}, there]) as on:
        waiting, slow = await on.ask("busy", deadline=0.5), await on.ask("slow", deadline=0.5)
        said = [(await on.ended(query_id)).value() for query_id in (waiting, slow)]
    assert {one["code"] for one in said} == {"deadline_exceeded"}
    assert "it waited for the model (the model backend is busy: all is taken)" in said[0]["message"]
    assert said[1]["message"] == "the answer was not ready before the query's deadline"


async def test_a_cut_of_the_history_is_announced_and_takes_whole_turns(redis_url: str) -> None:
    # a summary in the place of the oldest turns would come at any moment
    async with stage(redis_url, num_ctx=1_500, compact=False) as on:
        for number in range(4):
            await on.answer(await on.ask(f"{number}" + "x" * 900, "s1"))
        query_id = await on.ask("last", "s1")
        await on.answer(query_id)
        (cut,) = [e.value() for e in await on.journal(query_id) if e.type is EntryType.CONTEXT_TRUNCATED]
        messages = on.server.requests[-1].body["messages"]
        assert len(await on.turns("s1")) == 5
    assert messages[0]["role"] == "system"
    assert messages[-1]["content"] == "last"
    assert len(messages) == 2 + 2 * cut["kept_turns"]
    assert cut["dropped_turns"] + cut["kept_turns"] == 4
    assert cut["kept_turns"] >= 1
    assert messages[1]["content"].startswith(str(cut["dropped_turns"]))


async def test_a_history_that_the_backend_finds_too_long_is_halved_until_it_fits(redis_url: str) -> None:
    async with stage(redis_url) as on:
        for number in range(7):
            await on.answer(await on.ask(f"turn {number}", "s1"))
        # says neither how long the window is nor how long the prompt
        overflow = {"times": 2, "respond": {"status": 400, "error": "the prompt exceeds the context length"}}
        on.server.set_rules([overflow, DONE])
        query_id = await on.ask("last", "s1")
        await on.answer(query_id)
        cuts = [e.value() for e in await on.journal(query_id) if e.type is EntryType.CONTEXT_TRUNCATED]
        messages = on.server.requests[-1].body["messages"]
    assert [(cut["dropped_turns"], cut["kept_turns"]) for cut in cuts] == [(4, 3), (6, 1)]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["turn 6", "last"]


async def test_a_question_that_is_too_long_by_itself_fails_with_what_to_do(redis_url: str) -> None:
    async with stage(redis_url) as on:
        await on.answer(await on.ask("before", "s1"))
        on.server.set_rules([{"respond": {"status": 400, "error": "the prompt exceeds the context length"}}])
        end = await on.ended(await on.ask("last", "s1"))
        assert [len(one.body["messages"]) for one in on.server.requests[1:]] == [4, 2]
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "context_overflow")
    assert end.value()["message"].endswith("ask for less at once or raise num_ctx")


async def test_a_refusal_that_names_the_window_teaches_it_for_good(redis_url: str) -> None:
    told = "request (5000 tokens) exceeds the available context size (2000 tokens), try increasing it"
    async with stage(redis_url, compact=False) as on:
        for number in range(6):
            await on.answer(await on.ask(f"{number}" + "x" * 900, "s1"))
        on.server.set_rules([{"times": 1, "respond": {"status": 400, "error": told}}, DONE])
        first = await on.ask("first", "s1")
        await on.answer(first)
        cut = await on.seen(first, EntryType.CONTEXT_TRUNCATED)
        assert cut.value()["dropped_turns"] > 0
        sent = len(on.server.requests)
        await on.answer(await on.ask("second", "s1"))
        # planned so from the beginning: nothing is refused any more
        assert len(on.server.requests) == sent + 1
        assert len(on.server.requests[-1].body["messages"]) < 16
        assert on.server.requests[-1].body["options"]["num_predict"] < 2_000
        # what it is loaded with stays as it was asked for: another length would have it loaded again
        assert on.server.requests[-1].body["options"]["num_ctx"] == 32_000


async def test_a_question_that_does_not_fit_at_all_fails_with_what_to_do(redis_url: str) -> None:
    async with stage(redis_url, num_ctx=512) as on:
        end = await on.ended(await on.ask("x" * 9_000))
        assert on.server.requests == []
    assert (end.type, end.value()["code"]) == (EntryType.FAILED, "context_overflow")
    assert "num_ctx" in end.value()["message"]


async def test_the_backends_own_count_decides_how_much_history_fits(redis_url: str) -> None:
    async with stage(redis_url, num_ctx=1_500) as on:
        query_id = await on.ask(" ".join(f"y{n}" for n in range(600)), "s1")
        await on.answer(query_id)
        (turn,) = await on.turns("s1")
        message = await on.seen(query_id, EntryType.MESSAGE)
    sent = sum(len(m["content"]) for m in on.server.requests[-1].body["messages"])
    assert turn.ratio == pytest.approx(sent / message.value()["prompt_tokens"], rel=0.01)


async def test_fifty_turns_of_a_session_are_kept_and_sent(redis_url: str) -> None:
    async with stage(redis_url, compact=False) as on:
        for number in range(52):
            await on.answer(await on.ask(f"n{number}", "s1"))
        turns = await on.turns("s1")
        messages = on.server.requests[-1].body["messages"]
    assert [turn.query for turn in turns] == [f"n{number}" for number in range(2, 52)]
    assert [m["content"] for m in messages if m["role"] == "user"] == [f"n{number}" for number in range(1, 52)]
