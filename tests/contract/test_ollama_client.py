"""What Ollama's package does with a chat: each row is a reason why the adapter reads the stream itself.

A test that fails after an upgrade of `ollama` says which reason is gone: see the docstring of `shared.llm.ollama`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import ollama
import orjson
import pytest
from support.loopback import listening

from shared.errors import ModelError
from shared.llm.factory import open_chat_model
from shared.llm.ollama_admin import OllamaAdmin
from shared.llm.port import ChatRequest, StreamInterrupted, TextDelta, ToolCall

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "call_7", "function": {"name": "f", "arguments": {"x": 1}}}


@dataclass
class Seen:
    """url: of the server. bodies, keys: the bodies and the Authorization headers of its requests."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@asynccontextmanager
async def answering(*lines: Any) -> AsyncIterator[Seen]:
    """A server that answers each request with these lines; text is sent as it is, without escapes."""
    body = b"".join(orjson.dumps(line) + b"\n" for line in lines)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        seen.bodies.append(orjson.loads(content) if content else None)
        seen.keys.append(headers.get("authorization", ""))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))

    async with listening(serve) as port:
        seen = Seen(f"http://127.0.0.1:{port}")
        yield seen


def part(content: str = "", *, done: bool = False, **message: Any) -> dict[str, Any]:
    return {"model": "m", "message": {"role": "assistant", "content": content, **message}, "done": done}


async def package(url: str, **request: Any) -> list[ollama.ChatResponse]:
    """The answer as Ollama's package gives it."""
    async with ollama.AsyncClient(url, timeout=10) as client:
        return [one async for one in await client.chat("m", MESSAGES, stream=True, **request)]


async def adapter(url: str, **request: Any) -> list[Any]:
    model = open_chat_model("ollama", base_url=url)
    try:
        return [delta async for delta in model.stream(ChatRequest("m", **{"messages": MESSAGES, **request}))]
    finally:
        await model.aclose()


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029"], ids=ascii)
async def test_package_breaks_a_text_at_line_ends_of_unicode(end: str) -> None:
    async with answering(part(f"a{end}b", done=True)) as server:
        with pytest.raises(ValueError, match="Unterminated string"):
            await package(server.url)
        deltas = await adapter(server.url)
    assert "".join(one.text for one in deltas if isinstance(one, TextDelta)) == f"a{end}b"


async def test_package_takes_a_stream_without_its_end_for_whole() -> None:
    async with answering(part("half of")) as server:
        assert [one.done for one in await package(server.url)] == [False]
        with pytest.raises(StreamInterrupted):
            await adapter(server.url)


async def test_package_drops_the_id_of_a_call() -> None:
    async with answering(part(tool_calls=[CALL], done=True)) as server:
        (one,) = await package(server.url)
        assert one.message.tool_calls
        assert "call_7" not in one.model_dump_json()
        calls = [one for one in await adapter(server.url) if isinstance(one, ToolCall)]
    assert [call.id for call in calls] == ["call_7"]


async def test_package_sends_calls_and_results_without_ids() -> None:
    result = {"role": "tool", "tool_name": "f", "tool_call_id": "call_7", "content": "found"}
    own = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_7", "name": "f", "args": {"x": 1}}]},
        result,
    ]
    theirs = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    async with answering(part("ok", done=True)) as server:
        async with ollama.AsyncClient(server.url, timeout=10) as client:
            [_ async for _ in await client.chat("m", theirs, stream=True)]
        await adapter(server.url, messages=[*MESSAGES, *own])
    by_package, by_adapter = (orjson.dumps(body).decode() for body in server.bodies)
    assert (by_package.count("call_7"), by_adapter.count("call_7")) == (0, 2)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "default": "en"},
        {"type": "integer", "minimum": 1, "maximum": 9},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "object", "properties": {"y": {"type": "string"}}},
    ],
    ids=["anyOf", "default", "bounds", "pattern", "nested"],
)
async def test_package_drops_keywords_of_a_schema(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    async with answering(part("ok", done=True)) as server:
        await package(server.url, tools=[tool])
        await adapter(server.url, tools=[tool])
    by_package, by_adapter = (body["tools"][0]["function"]["parameters"]["properties"]["x"] for body in server.bodies)
    assert by_package != schema
    assert by_adapter == schema


async def test_package_cannot_forbid_cutting_a_long_prompt() -> None:
    assert not {"truncate", "shift"} & inspect.signature(ollama.AsyncClient.chat).parameters.keys()
    async with answering(part("ok", done=True)) as server:
        await adapter(server.url)
    assert (server.bodies[0]["truncate"], server.bodies[0]["shift"]) == (False, False)


@pytest.mark.parametrize(("key", "sent"), [(None, ""), ("ours", "bearer ours")], ids=["no key", "a key"])
async def test_environment_key_is_not_sent_to_a_named_server(
    key: str | None, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", "of-another-server")
    async with answering({"models": [{"model": "m"}]}) as server:
        admin = OllamaAdmin(server.url, key)
        assert await admin.models() == ["m"]
        await admin.aclose()
    assert server.keys == [sent]


async def test_facts_are_read_where_a_proxy_leaves_out_model_info() -> None:
    async with answering({"capabilities": ["completion", "tools"], "details": {}}) as server:
        admin = OllamaAdmin(server.url)
        assert await admin.capabilities("m") == {"completion", "tools"}
        assert (await admin.facts("m")).abilities == {"chat", "tools"}
        await admin.aclose()


async def test_answer_of_another_program_is_not_taken_for_facts() -> None:
    async with answering({"status": "fine"}) as server:
        admin = OllamaAdmin(server.url)
        with pytest.raises(ModelError, match="does not speak Ollama's protocol"):
            await admin.facts("m")
        await admin.aclose()
