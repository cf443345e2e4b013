"""What a model or a full Redis can do to an answer: it ends with a reason, or goes on when there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support.http_gateway import gateway_settings, serving
from support.stack import Stage, shown, stage

from shared.bus.keys import journal_key
from shared.contracts import MOST_RESULT, RESPONSE_GENERATION
from shared.records.journal import EntryType

ANSWERING = {"respond": {"text": "It is done."}}


async def attempts(on: Stage, query_id: str) -> set[int]:
    """At which deliveries the query was taken up."""
    return {e.value()["attempt"] for e in await on.journal(query_id) if e.type is EntryType.CLAIMED}


async def test_of_five_hundred_calls_in_one_message_sixteen_are_run(redis_url: str) -> None:
    calls = [{"name": "probe", "args": {"text": f"t{n}"}} for n in range(500)]
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": calls, "one_line": True}}, ANSWERING]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert await on.effects() == {f"t{n}": 1 for n in range(16)}
        told = [message["content"] for message in on.server.requests[-1].body["messages"] if message["role"] == "tool"]
        types = await on.types(query_id)
    assert len(told) == 500
    assert "you said t15" in told[15]
    assert set(told[16:]) == {"[tool error: only the first 16 tool calls of a message are run]"}
    assert (types.count("tool.request"), types.count("tool.result")) == (16, 16)


async def test_arguments_nested_too_deeply_are_told_to_the_model(redis_url: str) -> None:
    deep = '{"text": ' + "[" * 900 + "]" * 900 + "}"
    broken = {"name": "probe", "args": {}, "text_arguments": deep}
    good = {"name": "probe", "args": {"text": "fine"}}
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": [broken, good]}}, ANSWERING]
    async with stage(redis_url, rules, probes=1) as on:
        query_id = await on.ask("go")
        assert await on.answer(query_id) == "It is done."
        assert await on.effects() == {"fine": 1}
        told = [message["content"] for message in on.server.requests[-1].body["messages"] if message["role"] == "tool"]
        types = await on.types(query_id)
    assert told[0] == "[tool error: the arguments are nested more than 100 levels deep]"
    assert "you said fine" in told[1]
    assert types.count("claimed") == 1


async def test_an_answer_goes_on_when_a_full_redis_has_room_again(redis_url: str, raw: redis.Redis) -> None:
    rules = [{"respond": {"text": "one two three four five six seven", "pace": 0.1}}]
    try:
        async with stage(redis_url, rules) as on:
            query_id = await on.ask("go", "s1")
            await on.seen(query_id, EntryType.ANSWER)
            raw.config_set("maxmemory", 1)
            # several heartbeats: it is tried again and again
            await asyncio.sleep(1.0)
            raw.config_set("maxmemory", 0)
            assert await on.answer(query_id) == "one two three four five six seven"
            assert shown(await on.journal(query_id)) == "one two three four five six seven"
            await on.idle()
            assert len(await on.turns("s1")) == 1
            assert await attempts(on, query_id) == {1}
    finally:
        raw.config_set("maxmemory", 0)


async def test_a_deadline_that_passes_while_redis_is_full_is_told_as_soon_as_there_is_room(
    redis_url: str, raw: redis.Redis
) -> None:
    rules = [{"respond": {"text": "one two three four five six seven", "pace": 0.1}}]
    try:
        async with stage(redis_url, rules) as on:
            query_id = await on.ask("go", deadline=1.0)
            await on.seen(query_id, EntryType.ANSWER)
            raw.config_set("maxmemory", 1)
            await asyncio.sleep(1.5)
            raw.config_set("maxmemory", 0)
            end = await on.ended(query_id)
            assert (end.type, end.value()["code"]) == (EntryType.FAILED, "deadline_exceeded")
            await on.idle()
            assert len(on.server.requests) == 1
            assert await attempts(on, query_id) == {1}
    finally:
        raw.config_set("maxmemory", 0)


CALLS = [{"name": "probe", "args": {"text": f"t{n}"}} for n in range(500)]
DEEP = {"name": "probe", "args": {}, "text_arguments": '{"text": ' + "[" * 900 + "]" * 900 + "}"}


@pytest.mark.parametrize(
    ("respond", "run"), [({"tool_calls": CALLS, "one_line": True}, 16), ({"tool_calls": [DEEP]}, 0)]
)
async def test_who_asks_over_http_gets_an_answer_and_the_calls_that_were_run(
    respond: dict[str, Any], run: int, redis_url: str, tmp_path: Path
) -> None:
    rules = [{"when": {"tool_results": 0}, "respond": respond}, ANSWERING]
    settings = gateway_settings(redis_url, tmp_path)
    async with stage(redis_url, rules, probes=1), serving(settings) as site:
        told = await site.http.post("/query", json={"query": "go"}, timeout=60)
        assert (await site.http.get("/health")).status_code == 200
    assert (told.status_code, told.json()["answer"], len(told.json()["tool_calls"])) == (200, "It is done.", run)


async def test_who_asks_over_http_is_told_that_the_models_line_had_no_end(redis_url: str, tmp_path: Path) -> None:
    rules = [{"respond": {"text": "x" * 9_000_000}}]
    settings = gateway_settings(redis_url, tmp_path)
    async with stage(redis_url, rules) as on, serving(settings) as site:
        answer = await site.http.post("/query", json={"query": "go"}, timeout=60)
        assert len(on.server.requests) == 1, "it would come again"
    assert answer.status_code == 502
    assert answer.json()["error"]["message"] == "the model server sent 8 MB without the end of a line"


async def test_a_large_result_is_kept_once_and_shown_whole(redis_url: str, raw: redis.Redis, tmp_path: Path) -> None:
    said = "x" * (MOST_RESULT + 1)
    calls = [{"name": "probe", "args": {"text": said}}, {"name": "probe", "args": {"text": "little"}}]
    rules = [{"when": {"tool_results": 0}, "respond": {"tool_calls": calls}}, ANSWERING]
    settings = gateway_settings(redis_url, tmp_path)
    async with stage(redis_url, rules, probes=1, num_ctx=500_000) as on, serving(settings) as site:
        told = (await site.http.post("/query", json={"query": "go"}, timeout=60)).json()
        query_id = told["query_id"]
        again = (await site.http.get(f"/queries/{query_id}")).json()
        entries = raw.xrange(journal_key(query_id, "A"))
        (published,) = await on.published(RESPONSE_GENERATION)
    results = [call["result"] for call in told["tool_calls"]]
    assert results == [call["result"] for call in again["tool_calls"]]
    assert said in results[0]
    assert all("result_in" not in call for call in told["tool_calls"])
    types = {
        entry_id.decode(): fields[b"type"].decode()
        for entry_id, fields in entries
        if len(fields[b"data"]) > MOST_RESULT
    }
    # its arguments are as large: in the request, and in the model's message
    assert sorted(types.values()) == ["completed", "message", "tool.request", "tool.result"]
    (end,) = [orjson.loads(fields[b"data"]) for _, fields in entries if fields[b"type"] == b"completed"]
    assert [types.get(call.get("result_in")) for call in end["tool_calls"]] == ["tool.result", None]
    assert (end["tool_calls"][0]["result"], "little" in end["tool_calls"][1]["result"]) == ("", True)
    assert [len(call.result) for call in published.tool_calls] == [MOST_RESULT, len(results[1])]
