"""The generator on a real bus with the scripted model over HTTP: one query from its claim to its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis
from support.stack import shown, stage

from shared.bus.keys import journal_key
from shared.contracts import AGENT_TRANSITION, ANSWER_DIALOG, MOST_MATERIAL, RESPONSE_GENERATION, TOOL_RESULT
from shared.envelope import Envelope
from shared.records import lanes
from shared.records.journal import EntryType

PROBING = {
    "when": {"tool_results": 0},
    "respond": {
        "thinking": "I should look.",
        "text": "One moment. ",
        "tool_calls": [{"name": "probe", "args": {"text": "<<query>>"}, "id": "call_1"}],
    },
}
ANSWERING = {"respond": {"thinking": "Now I know.", "text": "It is done."}}


async def test_the_journal_tells_the_whole_life_of_a_query_in_order(redis_url: str) -> None:
    async with stage(redis_url, [PROBING, ANSWERING], probes=1) as on:
        query_id = await on.ask("ping", "s1")
        assert await on.answer(query_id) == "It is done."
        journal = await on.journal(query_id)
        await on.idle()
        logged = Counter(await on.logged(query_id))
    # A finished request leaves its stream after a while.
    assert logged.pop("tool.request.probe", 1) == 1
    assert logged == {
        "query.received": 1, "agent.transition": 7, "tool.result.probe": 1, "response.generation": 1,
        "answer.dialog": 1,
    }  # fmt: skip
    steps = [(e.type.value, e.value().get("action", "")) for e in journal]
    # deltas are batched by time: how many there are is not part of the promise
    kinds = [step for n, step in enumerate(steps) if n == 0 or step != steps[n - 1]]
    assert kinds == [
        ("claimed", ""),
        ("state", "RECEIVE"),
        ("state", "START_GENERATION"),
        ("thinking", ""),
        ("answer", ""),
        ("message", ""),
        ("state", "DISPATCH_TOOL"),
        ("state", "AWAIT_TOOL"),
        ("tool.request", ""),
        ("tool.result", ""),
        ("state", "TOOL_RESULT"),
        ("thinking", ""),
        ("answer", ""),
        ("message", ""),
        ("state", "PUBLISH"),
        ("completed", ""),
    ]
    claimed = journal[0].value()
    assert (claimed["query_id"], claimed["response_id"]) == (query_id, f"{query_id}:A")
    assert (claimed["session_id"], claimed["respondent_id"], claimed["attempt"]) == ("s1", "A", 1)
    request = next(e.value() for e in journal if e.type is EntryType.TOOL_REQUEST)
    assert (request["tool"], request["args"]) == ("probe", {"text": "ping"})
    result = next(e.value() for e in journal if e.type is EntryType.TOOL_RESULT)
    assert result["call_id"] == request["call_id"]
    assert result["call_id"].startswith(f"{query_id}:A:")
    assert (result["result"], result["error"], result["data"]) == ("you said ping", None, {"text": "ping"})
    first, second = [e.value() for e in journal if e.type is EntryType.MESSAGE]
    assert (first["step"], first["content"], first["thinking"]) == (0, "One moment. ", "I should look.")
    assert first["tool_calls"] == [{"id": "call_1", "name": "probe", "args": {"text": "ping"}}]
    assert first["prompt_tokens"] > 0
    assert (second["step"], second["content"], second["tool_calls"]) == (1, "It is done.", [])
    assert shown(journal) == "It is done."
    assert shown(journal, EntryType.THINKING) == "I should look.Now I know."
    end = journal[-1].value()
    assert end["thinking"] == "I should look.\n\nNow I know."
    assert [record["tool"] for record in end["tool_calls"]] == ["probe"]
    assert end["usage"]["prompt_tokens"] == first["prompt_tokens"] + second["prompt_tokens"]
    assert (end["finish_reason"], end["model"]) == ("stop", "gemma4:e4b")


async def test_an_answer_is_published_once_and_its_turn_is_kept(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url, [PROBING, ANSWERING], probes=1) as on:
        query_id = await on.ask("ping", "s1")
        await on.answer(query_id)
        await on.idle()
        (generation,) = await on.published(RESPONSE_GENERATION)
        (dialog,) = await on.published(ANSWER_DIALOG)
        transitions = await on.published(AGENT_TRANSITION, query_id)
        (result,) = await on.published(TOOL_RESULT.for_tool("probe"))
        (turn,) = await on.turns("s1")
        end = (await on.ended(query_id)).value()
    assert (generation.response_id, generation.respondent_id) == (f"{query_id}:A", "A")
    assert (generation.generator_id, generation.user_id) == ("GeneratorAgent", "u1")
    assert (generation.query, generation.answer) == ("ping", "It is done.")
    assert generation.system == on.server.requests[0].body["messages"][0]["content"]
    assert (generation.session_id, result.session_id) == ("s1", "s1")
    assert (generation.history, generation.material) == (None, None)
    for name in ("thinking", "usage", "finish_reason", "model"):
        assert generation.model_dump()[name] == end[name]
    assert "I should look." in generation.thinking
    assert [(r.tool, r.result) for r in generation.tool_calls] == [("probe", "you said ping")]
    assert (dialog.query, dialog.answer, dialog.session_id) == ("ping", "It is done.", "s1")
    assert (turn.query_id, turn.query, turn.answer, turn.interrupted) == (query_id, "ping", "It is done.", False)
    assert [(t.from_state, t.action, t.to) for t in transitions] == [
        ("IDLE", "RECEIVE", "RECEIVING"),
        ("RECEIVING", "START_GENERATION", "GENERATING"),
        ("GENERATING", "DISPATCH_TOOL", "DISPATCHING_TOOL"),
        ("DISPATCHING_TOOL", "AWAIT_TOOL", "WAITING_FOR_TOOL"),
        ("WAITING_FOR_TOOL", "TOOL_RESULT", "GENERATING"),
        ("GENERATING", "PUBLISH", "PUBLISHING"),
        ("PUBLISHING", "RESET", "IDLE"),
    ]
    assert {t.agent for t in transitions} == {"GeneratorAgent"}
    assert 86_000 < raw.ttl(f"local2:journal:{query_id}:A") <= 86_400


async def test_material_before_the_question_is_published_up_to_a_limit(redis_url: str) -> None:
    async with stage(redis_url, [ANSWERING]) as on:
        await on.answer(await on.ask("ping", "s1", material="x" * MOST_MATERIAL + "y"))
        (generation,) = await on.published(RESPONSE_GENERATION)
        asked = on.server.requests[0].body["messages"][-1]["content"]
    assert generation.material == "x" * MOST_MATERIAL
    # the model reads all of it
    assert asked == "x" * MOST_MATERIAL + "yping"


async def test_the_model_gets_the_system_prompt_the_tools_and_its_own_words_back(redis_url: str) -> None:
    async with stage(redis_url, [PROBING, ANSWERING], probes=1, num_ctx=9_000, temperature=0.25) as on:
        query_id = await on.ask("ping")
        await on.answer(query_id)
        first, second = [received.body for received in on.server.requests]
    for body in (first, second):
        assert body["think"] is True
        assert body["options"] == {"num_ctx": 9_000, "num_predict": 8_192, "temperature": 0.25}
        assert [tool["function"]["name"] for tool in body["tools"]] == ["probe"]
        assert body["messages"][0]["role"] == "system"
        assert "LoCAL2" in body["messages"][0]["content"]
        assert body["messages"][1] == {"role": "user", "content": "ping"}
    said, told = second["messages"][2:]
    assert (said["role"], said["content"], said["thinking"]) == ("assistant", "One moment. ", "I should look.")
    assert said["tool_calls"][0]["function"]["arguments"] == {"text": "ping"}
    assert (told["role"], told["tool_name"], told["name"]) == ("tool", "probe", "probe")
    assert told["tool_call_id"] == said["tool_calls"][0]["id"] == "call_1"
    assert told["content"].startswith("[untrusted content from probe")
    assert "\nyou said ping\n" in told["content"]


async def test_history_holds_clean_text_only(redis_url: str) -> None:
    async with stage(redis_url, [PROBING, ANSWERING], probes=1) as on:
        await on.answer(await on.ask("ping", "s1"))
        on.server.set_rules([])
        await on.answer(await on.ask("and now?", "s1"))
        messages = on.server.requests[-1].body["messages"]
    assert messages[1:] == [
        {"role": "user", "content": "ping"},
        {"role": "assistant", "content": "It is done."},
        {"role": "user", "content": "and now?"},
    ]


async def test_calls_of_one_message_run_at_the_same_time_and_keep_their_order(redis_url: str) -> None:
    calls = [{"name": "probe", "args": {"text": f"t{n}", "seconds": 0.4 - 0.1 * n}} for n in range(4)]
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": calls, "one_line": True}}, ANSWERING]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        await on.answer(query_id)
        journal = await on.journal(query_id)
        told = [m["content"] for m in on.server.requests[-1].body["messages"] if m["role"] == "tool"]
        assert await on.effects() == {"t0": 1, "t1": 1, "t2": 1, "t3": 1}
        told_observers = await on.bus.range(TOOL_RESULT.for_tool("probe").stream)
        ended = [TOOL_RESULT.decode(Envelope.parse("", *entry)).result[-2:] for entry in told_observers]
    kinds = [e.type for e in journal if e.type in (EntryType.TOOL_REQUEST, EntryType.TOOL_RESULT)]
    assert kinds == [EntryType.TOOL_REQUEST] * 4 + [EntryType.TOOL_RESULT] * 4
    # one after the other, the longest one, which was asked for first, would have ended first
    assert len(ended) == 4
    assert ended[0] != "t0"
    assert [text.splitlines()[1] for text in told] == [f"you said t{n}" for n in range(4)]


async def test_after_the_last_round_the_model_answers_and_the_tools_stay_in_the_request(redis_url: str) -> None:
    last = {"when": {"result": "No tool call is left"}, **ANSWERING}
    asking: dict[str, Any] = {
        "respond": {"tool_calls": [{"name": "probe", "args": {"text": "again <<result~you said.*>>"}}]},
    }
    async with stage(redis_url, [last, asking], probes=1, max_tool_iterations=3) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert [bool(r.body.get("tools")) for r in on.server.requests] == [True, True, True, True]
        assert sum((await on.effects()).values()) == 3


async def test_a_history_of_the_clients_own_is_used_and_nothing_is_stored(redis_url: str) -> None:
    given = [
        {"role": "system", "content": "Speak like a pirate."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "ahoy"},
    ]
    async with stage(redis_url) as on:
        query_id = await on.ask("more", "s1", messages=given)
        await on.answer(query_id)
        await on.idle()
        assert await on.turns("s1") == []
        assert await on.sessions.info("s1") is None
        messages = on.server.requests[-1].body["messages"]
        (generation,) = await on.published(RESPONSE_GENERATION, query_id)
    # one system message: many models' templates know no second one
    assert messages[0]["content"] == f"{generation.system}\n\nSpeak like a pirate."
    assert [m["content"] for m in messages[1:]] == ["hello", "ahoy", "more"]
    # whoever judges the answer, or learns from it, reads what led to it
    assert [m.content for m in generation.history] == ["Speak like a pirate.", "hello", "ahoy"]


async def test_a_query_may_use_the_allowed_tools_only(redis_url: str) -> None:
    async with stage(redis_url, [PROBING, {"respond": {"text": "<<result>>"}}], probes=1) as on:
        query_id = await on.ask("go", tools=["web_search"])
        answer = await on.answer(query_id)
        assert answer == "[unknown tool: 'probe']"
        assert not [one for one in await on.logged(query_id) if one.startswith("tool.")]
        assert "tools" not in on.server.requests[0].body
        assert await on.effects() == {}


async def test_a_call_of_a_missing_tool_is_on_no_stream(redis_url: str) -> None:
    calls = [{"name": name, "args": {"text": "x"}} for name in ("nothing", "probe")]
    rules: list[Any] = [{"when": {"tool_results": 0}, "respond": {"tool_calls": calls, "one_line": True}}, ANSWERING]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        await on.answer(query_id)
        logged = {one for one in await on.logged(query_id) if one.startswith("tool.")}
        told = [e.value()["result"] for e in await on.journal(query_id) if e.type is EntryType.TOOL_RESULT]
    assert "tool.result.probe" in logged <= {"tool.request.probe", "tool.result.probe"}
    assert sorted(told) == ["[unknown tool: 'nothing']", "you said x"]


async def test_a_query_may_choose_the_model_and_how_it_samples(redis_url: str) -> None:
    async with stage(redis_url, temperature=0.9) as on:
        query_id = await on.ask("go", model="other:1b", options={"temperature": 0.1, "seed": 7, "num_ctx": 1})
        await on.answer(query_id)
        body = on.server.requests[-1].body
        (generation,) = await on.published(RESPONSE_GENERATION)
    assert body["model"] == "other:1b"
    assert body["options"] == {"temperature": 0.1, "seed": 7, "num_ctx": 32_000, "num_predict": 8_192}
    assert (generation.model, generation.options) == ("other:1b", {"temperature": 0.1, "seed": 7})
    assert generation.own_options == {"temperature": 0.9}


async def test_a_foreign_session_is_set_aside_and_its_history_is_not_used(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url) as on:
        await on.answer(await on.ask("my secret", "s1"))
        on.user = "u2"
        query_id = await on.ask("what was said?", "s1")
        end = await on.ended(query_id)
        await on.idle()
        assert (end.type, end.value()["code"]) == (EntryType.FAILED, "abandoned")
        assert [r.query for r in on.server.requests] == ["my secret"]
        assert [t.query for t in await on.turns("s1")] == ["my secret"]
        assert await lanes.unfinished(on.bus, "s1", "A") == []
        # the owner is not held up by it
        on.user = "u1"
        await on.answer(await on.ask("again", "s1"))
    (letter,) = raw.xrange("local2:dead.letter")
    assert b"belongs to another user" in letter[1][b"payload"]


async def test_a_foreign_session_is_refused_also_to_a_second_owner(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url) as on:
        await on.answer(await on.ask("my secret", "s1"))
    async with stage(redis_url, replicas=0) as on:
        on.user = "u2"
        query_id = await on.ask("what was said?", "s1")
        # the first owner died as soon as it had the entry
        raw.xreadgroup("generator", "dead", {"local2:query.received": ">"})
    async with stage(redis_url) as on:
        assert (await on.ended(query_id)).value()["code"] == "abandoned"
        assert on.server.requests == []


@pytest.mark.parametrize("first", [False, True])
async def test_a_session_deleted_while_its_query_runs_does_not_come_back(redis_url: str, first: bool) -> None:
    slow = {"respond": {"text": "one two three four", "pace": 0.1}}
    async with stage(redis_url, [slow]) as on:
        query_id = await on.ask("go", "s1", first=first)
        await on.seen(query_id, EntryType.ANSWER)
        info = await on.sessions.info("s1")
        assert info is not None
        await on.sessions.delete(info)
        await on.idle()
        assert await on.sessions.info("s1") is None
        assert await on.sessions.of_user(on.user, 10) == []
        assert await on.turns("s1") == []
        assert await on.journal(query_id) == []


async def test_a_journal_lives_as_long_as_its_answer_may_take_and_then_as_long_as_results_are_kept(
    redis_url: str, raw: redis.Redis
) -> None:
    slow = {"respond": {"text": "one two three four", "pace": 0.1}}
    async with stage(redis_url, [slow], retention=30) as on:
        query_id = await on.ask("go", deadline=600)
        await on.seen(query_id, EntryType.ANSWER)
        assert 500 < raw.ttl(journal_key(query_id, "A")) <= 630
        await on.answer(query_id)
        assert 0 < raw.ttl(journal_key(query_id, "A")) <= 30


async def test_a_malformed_entry_stops_nobody(redis_url: str, raw: redis.Redis) -> None:
    async with stage(redis_url) as on:
        raw.xadd("local2:query.received", {"payload": b"{}"})
        raw.xadd("local2:query.received", {"nothing": b"\xff"})
        assert await on.answer(await on.ask("still there?")) == "You asked: still there?"
        await on.idle()
    assert raw.xlen("local2:dead.letter") == 2


async def test_unknown_field_of_a_file_is_left_out_of_the_claim(redis_url: str) -> None:
    async with stage(redis_url) as on:
        query_id = await on.ask("ping", "s1", attachments=[{"id": "f", "name": "a.png", "newer": 1}])
        claimed = await on.seen(query_id, EntryType.CLAIMED)
    assert claimed.value()["attachments"] == [{"id": "f", "name": "a.png"}]
