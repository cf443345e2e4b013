"""The model's thoughts go back with the results of its tool calls within the turn, also after a takeover.

The servers here refuse (HTTP 400) a tool round without thoughts, as DeepSeek, Kimi and Gemini do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support.apps import ProbeSettings, probe
from support.openai_place import Place, calling, open_place
from support.services import announced, running
from support.stack import stage

from shared.bus.keys import journal_key
from shared.participant.settings import Settings
from shared.participant.tool import Run, ToolResult, tool_service
from shared.records.journal import EntryType
from shared.testing.script import Script

THOUGHT = "I look it up."
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather", "parameters": {"type": "object"}},
}


def script(name: str, first: dict[str, Any], scope: str = "all") -> Script:
    """Return the script of a server that thinks before a call, and requires a field with each call."""
    insists = {"needs": name, "scope": scope, "error": "<<field>> is missing in assistant tool call message"}
    rules = [
        {"when": {"tool_results": 0}, "respond": {"thinking": THOUGHT, **first}},
        {"respond": {"text": "It is done."}},
    ]
    return Script.model_validate({"rules": rules, "insists": insists})


def calls(tool: str, **args: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": tool, "args": args, "signature": "c2lnbmVk"}]}


def came_back(body: Any) -> list[dict[str, Any]]:
    """Return the messages of a request that have tool calls."""
    parts = [part for content in body.get("contents") or () for part in content["parts"] if "functionCall" in part]
    return parts or [said for said in body["messages"] if said.get("tool_calls")]


@pytest.mark.parametrize(
    ("settings", "first", "back"),
    [
        ({"backend": "openai"}, {}, {"reasoning_content": THOUGHT}),
        ({"backend": "openai"}, {"reasoning_field": "reasoning"}, {"reasoning": THOUGHT}),
        ({"backend": "openai"}, {"reasoning_field": "reasoning_details"},
         {"reasoning_details": [{"type": "reasoning.text", "text": THOUGHT, "format": "scripted", "index": 0}]}),
        ({"backend": "google_genai", "backend_api_key": "k", "model": "gemini-3-flash"}, {},
         {"thoughtSignature": "c2lnbmVk"}),
        ({}, {}, {"thinking": THOUGHT}),
    ],
    ids=["deepseek", "vllm", "openrouter", "gemini", "ollama"],
)  # fmt: skip
async def test_thoughts_survive_a_takeover(
    redis_url: str, settings: dict[str, Any], first: dict[str, Any], back: dict[str, Any]
) -> None:
    rules = script(next(iter(back)), {**calls("probe", text="slow", seconds=1.0), **first})
    async with stage(redis_url, rules, probes=1, **settings) as on:
        query_id = await on.ask("go")
        await on.seen(query_id, EntryType.TOOL_REQUEST)
    async with stage(redis_url, rules, **settings) as on:
        async with running(probe, ProbeSettings(redis_url=redis_url, heartbeat=0.2, drain=0.2)):
            assert await on.answer(query_id) == "It is done."
        (request,) = on.server.requests
    (said,) = came_back(request.body)
    assert back.items() <= said.items()


class SearchMemory(BaseModel):
    """A memory with nothing in it. Call it in tests."""

    query: str
    do_rerank: bool = False


@asynccontextmanager
async def _open_memory(_settings: Settings) -> AsyncIterator[Run[SearchMemory]]:
    async def run(_args: SearchMemory) -> ToolResult:
        return ToolResult("nothing")

    yield run


async def test_thoughts_of_a_persona_come_back_with_its_calls(redis_url: str) -> None:
    rules = script("reasoning_content", calls("search_memory", query="x"))
    memory = tool_service("search_memory", SearchMemory, Settings, _open_memory)
    async with stage(redis_url, rules, backend="openai") as on:
        async with running(memory, Settings(redis_url=redis_url, heartbeat=0.2, drain=0.2)):
            await announced(redis_url, "search_memory", 1)
            query_id = await on.ask("go", mode="committee", personas=["skeptic"])
            assert await on.answer(query_id) == "It is done."
        back = [said["reasoning_content"] for request in on.server.requests for said in came_back(request.body)]
    assert back == [THOUGHT, THOUGHT]


@pytest.fixture
async def place(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(redis_url, tmp_path) as place:
        yield place


async def test_thoughts_before_a_clients_call_come_back(place: Place) -> None:
    place.on.server.set_rules(script("thinking", calls("weather", city="Paris")))
    said: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]
    first = await place.ask(said, tools=[WEATHER])
    (call,) = first.choices[0].message.tool_calls
    said += [first.choices[0].message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})]
    said += [{"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = await place.ask(said, tools=[WEATHER])
    assert last.choices[0].message.content == "It is done."
    assert came_back(place.sent[-1])[0]["thinking"] == THOUGHT


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_that_a_client_sends_back_are_passed_on(place: Place, name: str) -> None:
    """The journal of the first answer has expired."""
    place.on.server.set_rules(script("thinking", calls("weather", city="Paris")))
    said: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]
    first = await place.ask(said, tools=[WEATHER])
    message = first.choices[0].message
    await place.on.bus.link.call("DEL", journal_key(first.id.removeprefix("chatcmpl-"), "A"))
    kept = message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})
    said += [{**kept, name: getattr(message, name)}]
    said += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    last = await place.ask(said, tools=[WEATHER])
    assert last.choices[0].message.content == "It is done."
    assert came_back(place.sent[-1])[0]["thinking"] == THOUGHT


async def test_thoughts_of_an_earlier_turn_are_not_sent(place: Place) -> None:
    asking = {"user": "Paris", "tool_results": 0}
    place.rules({"when": asking, "respond": {"thinking": THOUGHT, **calls("weather", city="Paris")}},
                {"respond": {"thinking": THOUGHT, "text": "Rain."}})  # fmt: skip
    said: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]
    first = await place.ask(said, tools=[WEATHER])
    said += [first.choices[0].message.model_dump(exclude_none=True)]
    said += [{"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "rain"}]
    last = await place.ask(said, tools=[WEATHER])
    said += [last.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And now?"}]
    await place.ask(said)
    assert len(came_back(place.sent[-1])) == 1
    assert not any("thinking" in message for message in place.sent[-1]["messages"])


async def test_calls_keep_their_order_when_a_client_comes_back(place: Place) -> None:
    place.rules(calling("weather", "probe"), {"respond": {"text": "ok"}})
    said: list[Any] = [{"role": "user", "content": "go"}]
    first = await place.ask(said, tools=[WEATHER])
    (call,) = first.choices[0].message.tool_calls
    said += [first.choices[0].message.model_dump(exclude_none=True)]
    await place.ask([*said, {"role": "tool", "tool_call_id": call.id, "content": "rain"}], tools=[WEATHER])
    (message,) = came_back(place.sent[-1])
    assert [one["function"]["name"] for one in message["tool_calls"]] == ["weather", "probe"]
