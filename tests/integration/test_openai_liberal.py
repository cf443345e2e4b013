"""What stock clients send and leave out, and whether an error is worth another try: as plain HTTP, at one stack."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.http_gateway import client
from support.openai_place import Place, calling, open_place
from support.waiting import eventually

from shared.bus.keys import cancel_key
from shared.contracts import MAX_QUERY_CHARS

pytestmark = pytest.mark.asyncio(loop_scope="module")

_names = itertools.count()
Messages = list[dict[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("gateway")
    async with open_place(server_url, folder, num_ctx=131_072, client_gone_seconds=0.2) as place:
        yield place


@pytest_asyncio.fixture(loop_scope="module")
async def place(service: Place) -> AsyncIterator[Place]:
    service.rules({"respond": {"thinking": "Hm.", "text": "You asked: <<query>>"}})
    yield service
    await service.on.idle()


@pytest_asyncio.fixture(loop_scope="module")
async def http(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody whom nobody has seen before."""
    name = f"user{next(_names)}"
    made = await place.site.http.post("/keys", json={"name": name, "user_id": name, "trusted": True})
    async with client(place.site.url, made.json()["key"], timeout=30.0) as one:
        yield one


async def chat(http: httpx.AsyncClient, messages: Messages, **body: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": "local2", "messages": messages, **body})


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# ── liberal in ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("after", "roles"),
    [
        ([said("assistant", "It is")], ["user", "assistant"]),
        ([said("system", "Be brief.")], ["user"]),
        (
            [
                {"role": "assistant", "content": None,
                 "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            ["user", "assistant", "tool"],
        ),
    ],
    ids=["prefill", "instruction", "tool"],
)  # fmt: skip
async def test_the_last_message_may_be_of_any_role(
    place: Place, http: httpx.AsyncClient, after: Messages, roles: list[str]
) -> None:
    done = await chat(http, [said("user", "How is it?"), *after])
    assert done.status_code == 200, done.text
    sent = place.sent[-1]["messages"]
    assert [message["role"] for message in sent if message["role"] != "system"] == roles
    assert ("Be brief." in str(sent)) is (roles == ["user"])


async def test_parts_of_an_assistant_that_are_no_text_are_passed_over(place: Place, http: httpx.AsyncClient) -> None:
    parts = [
        {"type": "thinking", "thinking": "secret thoughts"}, {"type": "text", "text": "Yes."},
        {"type": "refusal", "refusal": "never that"}, {"type": "of_tomorrow", "anything": 1},
    ]  # fmt: skip
    done = await chat(http, [said("user", "Really?"), said("assistant", parts), said("user", "Sure?")])
    assert done.status_code == 200, done.text
    (before,) = [message for message in place.sent[-1]["messages"] if message["role"] == "assistant"]
    assert before["content"] == "Yes."
    # a user's are not: something would be missing in the question
    refused = await chat(http, [said("user", [{"type": "of_tomorrow"}])])
    assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
    assert "of_tomorrow" in refused.json()["error"]["message"]


async def test_one_system_message_goes_to_the_model_with_all_that_they_say(
    place: Place, http: httpx.AsyncClient
) -> None:
    messages = [said("system", "First."), said("developer", "Second."), said("user", "x"), said("system", "Third.")]
    assert (await chat(http, messages)).status_code == 200
    sent = place.sent[-1]["messages"]
    assert [message["role"] for message in sent].count("system") == 1
    assert sent[0]["role"] == "system"
    assert all(word in sent[0]["content"] for word in ("First.", "Second.", "Third."))


async def test_any_message_may_be_long_and_what_is_too_long_is_told_by_openais_code(
    place: Place, http: httpx.AsyncClient
) -> None:
    # within the model's window, which all messages share
    long, short = "word " * 40_000, said("user", "x")
    for messages in ([said("user", long)], [said("system", long), short], [said("assistant", long), short]):
        done = await chat(http, messages)
        assert done.status_code == 200, done.text
        assert long.strip() in place.sent[-1]["messages"][0 if messages[0]["role"] == "system" else 1]["content"]
    fields: dict[str, str]
    for fields in ({"input": long}, {"input": "x", "instructions": long}):
        done = await http.post("/v1/responses", json={"model": "local2", **fields})
        assert done.status_code == 200, done.text
    for most in (MAX_QUERY_CHARS, MAX_QUERY_CHARS + 1):
        # the first is beyond the window, the second beyond what any message may have
        for path, body in (
            ("chat/completions", {"messages": [said("user", "x" * most)]}),
            ("chat/completions", {"messages": [said("system", "x" * most), short]}),
            ("responses", {"input": "x" * most}),
        ):
            refused = await http.post(f"/v1/{path}", json={"model": "local2", **body})
            assert refused.status_code == 400, refused.text
            assert refused.headers["x-should-retry"] == "false"
            assert refused.json()["error"]["code"] == "context_length_exceeded"
    streams: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [said("user", "x" * MAX_QUERY_CHARS)]}),
        ("responses", {"input": "x" * MAX_QUERY_CHARS}),
    ]
    for path, body in streams:
        told = await http.post(f"/v1/{path}", json={"model": "local2", "stream": True, **body})
        assert '"code":"context_length_exceeded"' in told.text


@pytest.mark.parametrize(
    ("wish", "thinks"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
async def test_whether_the_model_thinks_is_the_clients_to_say(
    place: Place, http: httpx.AsyncClient, wish: dict[str, Any], thinks: bool
) -> None:
    assert (await chat(http, [said("user", "x")], **wish)).status_code == 200
    assert place.sent[-1]["think"] is thinks


# ── strict out ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_tells_the_same_text_reasoning_and_model_as_one_piece(
    place: Place, http: httpx.AsyncClient
) -> None:
    place.rules(calling("probe", thinking="Look.", text="I look."), {"respond": {"thinking": "So.", "text": "There."}})
    whole = (await chat(http, [said("user", "where?")])).json()
    streamed = await chat(http, [said("user", "where?")], stream=True, stream_options={"include_usage": None})
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert all(chunk["object"] == "chat.completion.chunk" and len(chunk["choices"]) == 1 for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = whole["choices"][0]["message"]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name], name
    assert chunks[-1]["model"] == whole["model"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"


# ── whether to try again ─────────────────────────────────────────────────────────────────────────────────────────


async def test_every_answer_has_an_id_to_ask_about(place: Place, http: httpx.AsyncClient) -> None:
    done = await chat(http, [said("user", "x")])
    assert done.headers["x-request-id"] == done.headers["x-query-id"]
    for refused in (
        await chat(http, []), await http.get("/v1/nowhere"), await chat(http, [said("user", "x")], model="gpt-4o"),
    ):  # fmt: skip
        assert refused.status_code in (400, 404)
        assert refused.headers["x-request-id"]
        assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_unknown_model_is_404_in_every_form(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    asked = {"messages": [said("user", "x")]} if path == "chat/completions" else {"input": "x"}
    refused = await http.post(f"/v1/{path}", json={"model": "gpt-4o", "stream": stream, **asked})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "gpt-4o" in refused.json()["error"]["message"]


async def test_what_the_model_server_refuses_for_good_is_not_worth_another_try(
    place: Place, http: httpx.AsyncClient
) -> None:
    place.rules({"respond": {"status": 400, "error": "that cannot be done"}})
    refused = await chat(http, [said("user", "x")])
    assert 400 <= refused.status_code < 500
    assert refused.headers["x-should-retry"] == "false"
    assert refused.json()["error"]["code"] == "model_rejected"


async def test_an_unknown_route_names_its_path(http: httpx.AsyncClient) -> None:
    refused = await http.post("/v1/audio/speech", json={})
    assert refused.status_code == 404
    assert "/v1/audio/speech" in refused.json()["error"]["message"]


# ── a client that goes away ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_that_waits_gives_its_place_back_when_its_client_has_gone(
    place: Place, http: httpx.AsyncClient
) -> None:
    place.rules({"respond": {"text": ["one ", "two"], "pace": 30}})
    places, before = place.on.settings.concurrency, len(place.sent)
    answered = [asyncio.create_task(chat(http, [said("user", f"question {n}")])) for n in range(places)]
    await eventually(lambda: len(place.sent) == before + places, what="all places are taken")
    last = asyncio.create_task(chat(http, [said("user", "one too many")]))

    async def waiting() -> str | None:
        ((entry_id, fields),) = await place.on.bus.latest("local2:query.received", 1)
        return entry_id if b"one too many" in b" ".join(fields) else None

    left = await eventually(waiting, what="the last one waits")
    last.cancel()

    async def cancelled() -> bool:
        return bool((await http.get(f"/queries/{left}")).json()["state"] == "cancelled")

    async def taken_back() -> bool:
        return bool(await place.on.bus.link.call("EXISTS", cancel_key(left)))

    await eventually(taken_back, what="the last one is taken back")
    # whoever is behind it has the next place
    answered[0].cancel()
    await eventually(cancelled, what="the last one is not waited for any more")
    assert len(place.sent) == before + places
    for one in answered:
        one.cancel()
    await asyncio.gather(*answered, last, return_exceptions=True)
    await eventually(lambda: place.on.server.streaming == 0, what="the others are stopped, too")


async def test_a_response_in_the_background_goes_on_without_its_client(place: Place, http: httpx.AsyncClient) -> None:
    place.rules({"respond": {"text": ["one ", "two ", "three"], "pace": 0.4}})
    asked = {"model": "local2", "input": "x", "background": True, "stream": True}
    async with http.stream("POST", "/v1/responses", json=asked) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                name = json.loads(line.removeprefix("data: "))["response"]["id"]
                break

    async def complete() -> dict[str, Any] | None:
        found: dict[str, Any] = (await http.get(f"/v1/responses/{name}")).json()
        return found if found["status"] == "completed" else None

    told = await eventually(complete, 30, "it is complete")
    assert told["output"][-1]["content"][0]["text"] == "one two three"
