"""The Responses API by OpenAI's client: items, events, tools, what was said before, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.openai_place import PARIS, Place, calling, open_place
from support.waiting import eventually

from shared.contracts import RESPONSE_GENERATION

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture
async def place(redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(redis_url, tmp_path, client_gone_seconds=0.5) as place:
        yield place


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


async def test_a_response_has_what_was_thought_and_said(place: Place) -> None:
    place.rules(calling("probe", thinking="Look first.", text="Wait."), {"respond": {"thinking": "So.", "text": "Hi."}})
    done = await place.ann.responses.create(
        model="local2", input="hello", instructions="Be brief.", metadata={"a": "b"}
    )
    assert (done.status, kinds(done)) == ("completed", ["reasoning", "message", "reasoning", "message"])
    assert done.output_text == "Wait.\n\nHi."
    assert done.output[0].summary[0].text == "Look first."
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens > 0
    assert (done.instructions, done.metadata) == ("Be brief.", {"a": "b"})
    assert place.sent[0]["messages"][0]["content"].endswith("Be brief.")
    again = await place.ann.responses.retrieve(done.id)
    assert again.model_dump() == done.model_dump()
    with pytest.raises(openai.NotFoundError):
        await place.bob.responses.retrieve(done.id)


async def test_a_streams_events_make_the_response_and_go_on_behind_any_of_them(place: Place) -> None:
    place.rules(calling("probe", thinking="Hm.", text="Wait. "), {"respond": {"text": "It is <<result>> indeed."}})
    stream = await place.ann.responses.create(model="local2", input="hello", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    built: dict[int, str] = {}
    for event in events:
        if event.type == "response.output_text.delta":
            built[event.output_index] = built.get(event.output_index, "") + event.delta
    final = events[-1].response
    said = {n: item.content[0].text for n, item in enumerate(final.output) if item.type == "message"}
    assert built == said
    opened = [event.item.id for event in events if event.type == "response.output_item.added"]
    closed = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert opened == closed == [item.id for item in final.output]
    assert (await place.ann.responses.retrieve(final.id)).output_text == final.output_text
    for after in (-1, 0, 3, len(events) - 2):
        rest = await place.ann.responses.retrieve(final.id, stream=True, starting_after=after)
        assert [event.model_dump() async for event in rest] == [event.model_dump() for event in events[after + 1 :]]


async def test_a_clients_tool_and_the_response_before(place: Place) -> None:
    place.rules(calling("weather", thinking="The sky."), {"respond": {"text": "It says <<result>>."}})
    first = await place.ann.responses.create(model="local2", input="Paris?", tools=[WEATHER])
    assert kinds(first) == ["reasoning", "function_call"]
    call = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert not await place.on.published(RESPONSE_GENERATION)
    told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    whole: Any = [{"role": "user", "content": "Paris?"}, *[item.model_dump() for item in first.output], told]
    reference: Any = [{"role": "user", "content": "Paris?"}, {"type": "item_reference", "id": call.id}, told]
    for fields in ({"previous_response_id": first.id, "input": [told]}, {"input": whole}, {"input": reference}):
        last = await place.ann.responses.create(model="local2", tools=[WEATHER], **fields)
        assert last.output_text == "It says rain."
        assert [m["role"] for m in place.sent[-1]["messages"]] == ["system", "user", "assistant", "tool"]
        assert place.sent[-1]["messages"][2]["thinking"] == "The sky."
    more = await place.ann.responses.create(model="local2", input="and then?", previous_response_id=last.id)
    assert more.previous_response_id == last.id
    said = [m["content"] for m in place.sent[-1]["messages"] if m["role"] in ("user", "assistant")]
    assert said[:4] == ["Paris?", "", "It says rain.", "and then?"]
    with pytest.raises(openai.NotFoundError):
        await place.bob.responses.create(model="local2", input="x", previous_response_id=last.id)


async def test_what_was_done_at_another_server_is_no_hindrance(place: Place) -> None:
    place.rules({"respond": {"text": "Hi."}})
    before: Any = [
        {"role": "user", "content": "news?"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "news"}},
        {"role": "assistant", "content": [{"type": "output_text", "text": "None.", "annotations": []}]},
        {"role": "user", "content": "and now?"},
    ]
    assert (await place.ann.responses.create(model="local2", input=before)).output_text == "Hi."
    assert [m["content"] for m in place.sent[-1]["messages"][1:]] == ["news?", "None.", "and now?"]
    with pytest.raises(openai.BadRequestError, match="items of type of_tomorrow"):
        await place.ann.responses.create(model="local2", input=[*before, {"type": "of_tomorrow"}])


async def test_a_calls_events_come_whole(place: Place) -> None:
    place.rules(calling("weather"))
    stream = await place.ann.responses.create(model="local2", input="Paris?", tools=[WEATHER], stream=True)
    events = {event.type: event async for event in stream}
    assert events["response.function_call_arguments.done"].arguments == '{"city":"Paris"}'
    assert events["response.output_item.done"].item.type == "function_call"
    assert events["response.completed"].response.output[0].call_id.startswith("call_")


async def test_tools_of_a_namespace_and_those_that_take_a_text(place: Place) -> None:
    """As Codex offers them: the model sees functions, the client its own forms, in events and when it goes on."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    patch = {"type": "custom", "name": "patch", "description": "Edits a file", "format": grammar}
    agents = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [WEATHER, patch]}
    tools: Any = [patch, agents, {"type": "web_search", "external_web_access": False}]
    calls = [
        {"name": "patch", "args": {"input": "*** Begin"}},
        {"name": "agents__weather", "args": {"city": "Paris"}},
        {"name": "agents__patch", "args": {"text": "x"}},
    ]
    place.rules({"when": {"tool_results": 0}, "respond": {"tool_calls": calls}}, {"respond": {"text": "<<result>>!"}})
    stream = await place.ann.responses.create(model="local2", input="Edit it.", tools=tools, stream=True)
    events = [event async for event in stream]
    functions = {tool["function"]["name"]: tool["function"] for tool in place.sent[0]["tools"]}
    assert functions["patch"]["parameters"]["required"] == ["input"]
    assert functions["patch"]["description"].endswith("must fit this grammar (lark):\nstart: /.+/")
    assert functions["agents__weather"]["description"] == "Sub-agents.\nTells the weather"
    first = events[-1].response
    assert [(item.type, item.name, item.namespace) for item in first.output] == [
        ("custom_tool_call", "patch", None),
        ("function_call", "weather", "agents"),
        ("custom_tool_call", "patch", "agents"),
    ]
    # what is not the one argument is handed on as it came
    assert [first.output[0].input, first.output[2].input] == ["*** Begin", '{"text":"x"}']
    told = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [told[0].delta, told[1].input] == ["*** Begin", "*** Begin"]
    results: Any = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": f"done {n}"}
        for n, item in enumerate(first.output)
    ]
    given: Any = [{"role": "user", "content": "Edit it."}, *[item.model_dump() for item in first.output], *results]
    for fields in ({"previous_response_id": first.id, "input": results}, {"input": given}):
        last = await place.ann.responses.create(model="local2", tools=tools, **fields)
        assert last.output_text == "done 2!"
        _, _, asked, *answers = place.sent[-1]["messages"]
        assert [call["function"]["name"] for call in asked["tool_calls"]] == [call["name"] for call in calls]
        assert asked["tool_calls"][0]["function"]["arguments"] == {"input": "*** Begin"}
        assert [answer["content"] for answer in answers] == ["done 0", "done 1", "done 2"]


async def test_structured_text_and_what_was_cut(place: Place) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": PARIS, "strict": True}}
    place.rules({"respond": {"text": 'So:\n```json\n{"city": "Rome"}\n```'}})
    done = await place.ann.responses.create(model="local2", input="Where?", text=form)
    assert json.loads(done.output_text) == {"city": "Rome"}
    place.rules({"respond": {"text": "It goes on", "done_reason": "length"}})
    cut = await place.ann.responses.create(model="local2", input="Where?", max_output_tokens=20)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert place.sent[-1]["options"]["num_predict"] == 20


async def test_in_the_background_it_is_asked_for_cancelled_and_forgotten(place: Place) -> None:
    place.rules({"respond": {"text": ["one ", "two"], "pace": 30}})
    queued = await place.ann.responses.create(model="local2", input="slowly", background=True)
    assert (queued.status, queued.background) == ("queued", True)

    async def said() -> bool:
        return (await place.ann.responses.retrieve(queued.id)).output_text == "one "

    await eventually(said, 10, "the first word")
    assert (await place.ann.responses.cancel(queued.id)).status == "cancelled"

    async def over() -> bool:
        return (await place.ann.responses.retrieve(queued.id)).status == "cancelled"

    await eventually(over, 10, "the end")
    await place.on.server.wait_until(lambda server: server.streaming == 0)
    await place.ann.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        await place.ann.responses.retrieve(queued.id)
    place.rules({"respond": {"text": "done"}})
    unkept = await place.ann.responses.create(model="local2", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await place.ann.responses.retrieve(unkept.id)


async def test_what_cannot_be_done_is_said(place: Place) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": "x", "tools": [{"type": "computer_use"}]}, "computer_use"),
        ({"input": [{"type": "of_tomorrow"}]}, "of_tomorrow"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio", "data": "f"}]}]}, "input_audio"),
        ({"input": []}, "none of them is the user's"),
        ({"input": "x", "conversation": "c"}, "conversation"),
    ]
    for fields, words in cases:
        with pytest.raises(openai.BadRequestError, match=words):
            await place.ann.responses.create(model="local2", **fields)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        await place.ann.responses.create(model="gpt-4o", input="x")
    place.rules({"respond": {"status": 400, "error": "never"}})
    failed = await place.ann.responses.create(model="local2", input="x", stream=True)
    *_, last = [event async for event in failed]
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "model_rejected",
    )


async def test_models_are_told_one_by_one(place: Place) -> None:
    assert (await place.ann.models.retrieve("local2")).id == "local2"
    with pytest.raises(openai.NotFoundError):
        await place.ann.models.retrieve("gpt-4o")


# ── clients that go away ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
async def test_a_run_ends_a_while_after_its_client_has_gone(place: Place, stream: bool) -> None:
    place.rules({"respond": {"text": ["one ", "two ", "three"], "pace": 30}})
    body = {"model": "local2", "stream": stream, "messages": [{"role": "user", "content": "x"}]}
    key = {"Authorization": f"Bearer {place.ann.api_key}"}
    async with httpx.AsyncClient(base_url=place.site.url, headers=key, trust_env=False) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, timeout=60))
        await place.on.server.wait_until(lambda server: server.streaming == 1)
        asking.cancel()
    await place.on.server.wait_until(lambda server: len(server.aborted) == 1, 10)


async def test_the_same_request_again_joins_the_run_that_was_left(place: Place) -> None:
    # a grace that a busy machine does not miss
    grace = await place.site.http.patch("/participants/gateway/settings", json={"client_gone_seconds": 60})
    assert grace.status_code == 200, grace.text
    place.rules({"respond": {"text": ["one ", "two ", "three"], "pace": 0.6}})
    impatient = place.ann.with_options(timeout=0.8, max_retries=0)
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(model="local2", messages=messages)
    done = await place.ann.chat.completions.create(model="local2", messages=messages)
    assert done.choices[0].message.content == "one two three"
    assert len(place.sent) == 1


@pytest.mark.parametrize("another", ["form", "model"])
async def test_the_same_question_in_another_form_or_to_another_model_is_another_request(
    place: Place, another: str
) -> None:
    place.rules({"times": 1, "respond": {"text": ["one ", "two"], "pace": 30}}, {"respond": {"text": "mine"}})
    impatient = place.ann.with_options(timeout=1.5, max_retries=0)
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.APITimeoutError):
        await impatient.chat.completions.create(model="local2", messages=messages)
    if another == "form":
        told = (await place.ann.responses.create(model="local2", input="x")).output_text
    else:
        done = await place.ann.chat.completions.create(model="gemma4:e4b", messages=messages)
        told = done.choices[0].message.content or ""
    assert told == "mine"
    await place.on.server.wait_until(lambda server: len(server.aborted) == 1, 10)
