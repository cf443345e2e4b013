"""OpenAI's own client against the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import redis
from support.http_gateway import ADMIN_KEY, FakeGenerator, Site
from support.waiting import eventually


@pytest.fixture
async def stock(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=ADMIN_KEY, max_retries=0) as stock:
        yield stock


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


async def test_a_completion_uses_the_whole_agent(stock: openai.AsyncOpenAI, fake: FakeGenerator) -> None:
    done = await stock.chat.completions.create(model="local2", messages=[user("tool one")])
    choice = done.choices[0]
    assert choice.message.content == "You said: one"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.message.model_extra is not None
    # the agent's steps are told among its thoughts
    told = 'Let me see.\n\nweb_search {"query":"x"}'
    assert choice.message.model_extra["reasoning"] == choice.message.model_extra["reasoning_content"] == told
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (11, 7, 18)
    assert done.model == "scripted:1b"
    assert done.id == f"chatcmpl-{fake.started[0]}"
    long = await stock.chat.completions.create(model="local2", messages=[user("long one")])
    assert long.choices[0].finish_reason == "length"


async def test_a_stream_has_thinking_answer_usage_and_an_end(stock: openai.AsyncOpenAI, fake: FakeGenerator) -> None:
    stream = await stock.chat.completions.create(
        model="local2", messages=[user("say hello there")], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "You said: hello there"
    thought = [(delta.model_extra or {}).get("reasoning") or "" for delta in deltas]
    assert "".join(thought) == "Let me see."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 18
    assert len({chunk.id for chunk in chunks}) == 1


async def test_steps_are_told_in_a_stream_as_in_one_piece_and_as_events_where_they_are_asked_for(
    stock: openai.AsyncOpenAI, site: Site, fake: FakeGenerator
) -> None:
    stream = await stock.chat.completions.create(model="local2", messages=[user("tool one")], stream=True)
    told = [(chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or "" async for chunk in stream]
    assert "".join(told) == 'Let me see.\n\nweb_search {"query":"x"}'
    body = {"model": "local2", "messages": [user("tool one")], "stream": True}
    events: dict[str, list[Any]] = {}
    for wanted in ("", "status"):
        text = (await site.http.post("/v1/chat/completions", json=body, headers={"X-LoCAL2-Events": wanted})).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        events[wanted] = [one["event"] for line in lines if "event" in (one := json.loads(line))]
    assert events[""] == []
    shown = {"description": 'web_search {"query":"x"}'}
    assert events["status"] == [
        {"type": "status", "data": {**shown, "done": False}}, {"type": "status", "data": {**shown, "done": True}}
    ]  # fmt: skip


async def test_tools_and_restarts_inside_do_not_show(stock: openai.AsyncOpenAI, fake: FakeGenerator) -> None:
    for query, expected in {
        "tool me": "Searching.\n\nYou said: me",
        "restart here": "You said: re\n\nYou said: here",
    }.items():
        stream = await stock.chat.completions.create(model="local2", messages=[user(query)], stream=True)
        text = ""
        async for chunk in stream:
            assert chunk.choices[0].delta.tool_calls is None
            assert chunk.choices[0].finish_reason in (None, "stop")
            text += chunk.choices[0].delta.content or ""
        assert text == expected


async def test_the_history_and_the_options_reach_the_agent(
    stock: openai.AsyncOpenAI, fake: FakeGenerator, raw: redis.Redis
) -> None:
    parts = [{"type": "text", "text": "say a"}, {"type": "text", "text": "and b"}]
    await stock.chat.completions.create(
        model="scripted:1b",
        messages=[
            {"role": "developer", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Hello"},
            user(parts),
        ],
        temperature=0.2, top_p=0.9, max_tokens=50, seed=7, stop="END",
    )  # fmt: skip
    sent = fake.queries[0].payload
    assert sent.query == "say a\nand b"
    assert [(m.role, m.content) for m in sent.messages or []] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")
    ]  # fmt: skip
    assert sent.options == {"temperature": 0.2, "top_p": 0.9, "num_predict": 50, "seed": 7, "stop": ["END"]}
    assert sent.model == "scripted:1b"
    assert not list(raw.scan_iter("local2:session*"))


async def test_what_cannot_be_done_is_a_clear_400(stock: openai.AsyncOpenAI) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [user(picture)]}, "image_url"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "y"}]}, "none of them is the user's"),
        ({"messages": [user("")]}, "empty"),
        ({"messages": [user("x" * 400_001)]}, "longer"),
        ({"messages": [user("x")], "temperature": 9}, "temperature"),
        ({"messages": [user("x")], "max_tokens": 0}, "max_tokens"),
        ({"messages": [user("x")], "n": 2}, "n:"),
    ]
    for arguments, words in cases:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await stock.chat.completions.create(model="local2", **arguments)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.code


async def test_failures_are_what_the_client_knows(site: Site, stock: openai.AsyncOpenAI, fake: FakeGenerator) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await stock.chat.completions.create(model="local2", messages=[user("fail model_missing")])
    assert (caught.value.status_code, caught.value.code) == (502, "model_missing")
    stream = await stock.chat.completions.create(model="local2", messages=[user("fail model_missing")], stream=True)
    with pytest.raises(openai.APIError, match="it failed: model_missing"):
        async for _ in stream:
            pass
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_the_models_are_the_assistant_and_what_is_behind_it(
    stock: openai.AsyncOpenAI, fake: FakeGenerator
) -> None:
    assert [model.id async for model in stock.models.list()] == ["local2", "local2-utility", "scripted:1b"]


async def test_a_stream_that_is_left_does_not_stop_the_answer(
    site: Site, stock: openai.AsyncOpenAI, fake: FakeGenerator
) -> None:
    stream = await stock.chat.completions.create(model="local2", messages=[user("slow x")], stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.sleep(0)
    fake.gate.set()

    async def complete() -> bool:
        return bool((await site.http.get(f"/queries/{fake.started[0]}")).json()["state"] == "completed")

    await eventually(complete)


async def test_the_same_idempotency_key_asks_once_and_another_request_with_it_is_the_documented_409(
    site: Site, stock: openai.AsyncOpenAI, fake: FakeGenerator
) -> None:
    once: Any = {"extra_headers": {"Idempotency-Key": "order-66"}}
    history = [user("Hello"), {"role": "assistant", "content": "Hello!"}, user("say one")]
    done = [await stock.chat.completions.create(model="local2", messages=history, **once) for _ in range(2)]
    assert {one.id for one in done} == {f"chatcmpl-{fake.started[0]}"}
    stream = await stock.chat.completions.create(model="local2", messages=history, stream=True, **once)
    assert {chunk.id async for chunk in stream} == {done[0].id}
    assert len(fake.started) == 1
    for messages in ([user("say one")], [*history[:-1], user("say two")]):
        with pytest.raises(openai.ConflictError) as caught:
            await stock.chat.completions.create(model="local2", messages=messages, **once)
        assert caught.value.code == "idempotency_conflict"
    described = (await site.http.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]["post"]
    assert "409" in described["responses"]
    (header,) = [one for one in described["parameters"] if one["name"] == "idempotency-key"]
    assert "asks once; another request with it is refused (409)" in header["description"]
