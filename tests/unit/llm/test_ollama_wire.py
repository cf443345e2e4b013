"""What only Ollama's protocol has: the request's form, NDJSON to the byte, and the commands its errors name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.loopback import listening

from shared.llm.factory import open_chat_model
from shared.llm.ollama_admin import OllamaAdmin, keep_alive_value, ollama_url
from shared.llm.port import (
    ChatRequest,
    Delta,
    Finish,
    ModelError,
    ModelMissing,
    ModelOverloaded,
    ModelUnavailable,
    StreamInterrupted,
    TextDelta,
    ToolCall,
)
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import Script

ASK = ChatRequest(model="gemma4:e4b", messages=[{"role": "user", "content": "hi"}])


async def answer(url: str, request: ChatRequest = ASK, keep_alive: str | None = None) -> list[Delta]:
    model = open_chat_model("ollama", base_url=url, keep_alive=keep_alive)
    try:
        return [delta async for delta in model.stream(request)]
    finally:
        await model.aclose()


async def sent(request: ChatRequest, keep_alive: str | None = None) -> dict[str, Any]:
    """The body that reaches the server."""
    async with ScriptedModelServer() as server:
        await answer(server.url, request, keep_alive)
        return dict(server.requests[0].body)


@asynccontextmanager
async def raw(*pieces: bytes, head: bytes = b"200 OK\r\ncontent-type: application/x-ndjson") -> AsyncIterator[str]:
    """A server that sends exactly these pieces of bytes, each in a write of its own, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + head + b"\r\nconnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    async with listening(serve) as port:
        yield f"127.0.0.1:{port}"


def line(content: str = "", **rest: Any) -> bytes:
    return (
        orjson.dumps({"model": "m", "message": {"role": "assistant", "content": content}, "done": False, **rest})
        + b"\n"
    )


async def test_think_and_num_ctx_are_always_sent() -> None:
    body = await sent(replace(ASK, think=False, num_ctx=8192, options={"temperature": 0.5, "max_tokens": 9}))
    assert body["think"] is False
    assert body["options"] == {"temperature": 0.5, "num_predict": 9, "num_ctx": 8192}
    assert body["stream"] is True
    assert "keep_alive" not in body
    assert (await sent(ASK))["think"] is True


async def test_the_server_is_told_not_to_cut_the_prompt_silently() -> None:
    body = await sent(ASK)
    assert (body["truncate"], body["shift"]) == (False, False)


@pytest.mark.parametrize(("given", "expected"), [("5m", "5m"), ("-1", -1), ("30", 30)])
async def test_keep_alive_is_sent_in_the_form_that_the_server_takes(given: str, expected: object) -> None:
    assert (await sent(ASK, given))["keep_alive"] == expected
    assert keep_alive_value(given) == expected


async def test_a_response_schema_becomes_the_format() -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    assert (await sent(replace(ASK, response_schema=schema)))["format"] == schema


async def test_a_tool_round_is_written_in_ollamas_form() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "search",
            "tool_calls": [{"id": "c1", "name": "web_search", "args": {"query": "x"}}],
        },
        {"role": "tool", "tool_name": "web_search", "tool_call_id": "c1", "content": "found"},
    ]
    body = await sent(replace(ASK, messages=messages))
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "thinking": "search",
            "tool_calls": [{"id": "c1", "function": {"index": 0, "name": "web_search", "arguments": {"query": "x"}}}],
        },
        {
            "role": "tool",
            "content": "found",
            "tool_name": "web_search",
            "name": "web_search",
            "tool_call_id": "c1",
        },
    ]


async def test_bytes_may_be_cut_anywhere_even_inside_a_character() -> None:
    stream = line("é\u0085🦊\u2028\x0b ") + line("", done=True, done_reason="stop", eval_count=3)
    for size in (1, 2, 3, 7):
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        async with raw(*pieces) as url:
            deltas = await answer(url)
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "é\u0085🦊\u2028\x0b "
        assert deltas[-1] == Finish("stop", None, 3, "m")


async def test_the_last_line_may_carry_content_and_calls_and_lack_its_newline() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    last = {"role": "assistant", "content": "end", "tool_calls": [call]}
    async with raw(line("the "), orjson.dumps({"model": "m", "message": last, "done": True})) as url:
        deltas = await answer(url)
    assert [d.text for d in deltas if isinstance(d, TextDelta)] == ["the ", "end"]
    assert [(d.name, d.args) for d in deltas if isinstance(d, ToolCall)] == [("f", {})]


async def test_lines_that_carry_nothing_keep_the_stream_alive() -> None:
    rule = {"respond": {"text": ["a", *([""] * 10), "b"], "pace": 0.05}}
    async with ScriptedModelServer([rule]) as server:
        deltas = await answer(server.url, replace(ASK, idle_timeout=0.3))
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "ab"


@pytest.mark.parametrize(
    "junk",
    [
        b"[]\n",
        b"7\n",
        b'{"message": 3}\n',
        b'{"message": {"tool_calls": [{}]}}\n',
        b'{"message": {"content": 3}}\n',
        b"\xff\n",
    ],
)
async def test_a_line_of_another_form_interrupts_the_stream(junk: bytes) -> None:
    async with raw(line("a"), junk, line(done=True)) as url:
        with pytest.raises(StreamInterrupted, match="cannot be read"):
            await answer(url)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 900 + "]" * 900, "nested more than 100 levels"),
        ("NaN", "cannot be passed on"),
        ("1e999", "cannot be passed on"),
        pytest.param("9" * 400, "cannot be passed on", id="400 digits"),
        pytest.param("9" * 6_000, "cannot be passed on", id="6,000 digits"),
        ('123456789012345678901234567890, "b": NaN', "cannot be passed on"),
        ('"\\ud83e"', "cannot be passed on"),
    ],
)
async def test_arguments_that_no_entry_can_hold_are_told_with_their_call(value: str, reason: str) -> None:
    call = '{"function": {"name": "f", "arguments": {"a": ' + value + "}}}"
    called = '{"model": "m", "message": {"tool_calls": [' + call + "]}}\n"
    async with raw(called.encode(), line(done=True)) as url:
        (found, _finish) = await answer(url)
    assert isinstance(found, ToolCall)
    assert (found.name, found.args) == ("f", {})
    assert reason in (found.error or "")


@pytest.mark.parametrize("given", ["", "i" * 300, "twice"])
async def test_a_call_whose_id_is_missing_endless_or_given_before_gets_one_of_our_own(given: str) -> None:
    calls = [{"id": said, "function": {"name": "f", "arguments": {}}} for said in ("twice", given)]
    async with raw(line(message={"tool_calls": calls}), line(done=True)) as url:
        (first, second, _finish) = await answer(url)
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert first.id == "twice"
    assert second.id.startswith("call_")
    assert len(second.id) < 20


async def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    async with raw(b'{"model":"m","message":{"content":"a\\ud83eb"}}\n', line(done=True)) as url:
        deltas = await answer(url)
    assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == "a\ufffdb"


async def test_a_connection_closed_without_an_answer_is_unavailable() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async with listening(hang_up) as port:
        with pytest.raises(ModelUnavailable):
            await answer(f"127.0.0.1:{port}")


async def test_a_body_that_ends_early_is_interrupted() -> None:
    async with raw(line("a"), head=b"200 OK\r\ncontent-length: 1000") as url:
        with pytest.raises(StreamInterrupted, match="connection to Ollama was lost"):
            await answer(url)


async def test_another_kind_of_server_is_named_as_such() -> None:
    async with raw(b"<html></html>", head=b"200 OK\r\ncontent-type: text/html") as url:
        with pytest.raises(ModelError, match="does not speak Ollama's protocol"):
            await answer(url)


async def test_busy_in_the_middle_of_a_stream_is_overloaded() -> None:
    async with raw(line("a"), b'{"error":"server busy, please try again"}\n') as url:
        with pytest.raises(ModelOverloaded):
            await answer(url)


async def test_a_missing_model_names_the_command_that_gets_it() -> None:
    async with ScriptedModelServer(Script(models={})) as server:
        with pytest.raises(ModelMissing, match=r"ollama pull gemma4:e4b$"):
            await answer(server.url)


async def test_a_pull_reports_its_progress_and_the_model_is_there_afterwards() -> None:
    async with ScriptedModelServer(Script(models={})) as server:
        admin = OllamaAdmin(server.url)
        with pytest.raises(ModelMissing):
            await admin.capabilities("gemma4:e4b")
        progress = [part async for part in admin.pull("gemma4:e4b")]
        assert [part.completed for part in progress if part.total] == [0, 500_000, 1_000_000]
        assert progress[-1].status == "success"
        assert await admin.models() == ["gemma4:e4b"]
        assert await admin.capabilities("gemma4:e4b") == {"completion", "tools", "thinking"}
        assert await admin.loaded() == []
        await admin.aclose()


async def test_a_pull_of_an_unknown_model_fails_with_the_servers_words() -> None:
    async with ScriptedModelServer() as server, aclosing(OllamaAdmin(server.url)) as admin:
        with pytest.raises(ModelError, match="file does not exist"):
            [part async for part in admin.pull("nosuch")]


async def test_a_server_that_is_not_there_is_told_with_the_command_that_starts_it() -> None:
    async with aclosing(OllamaAdmin("127.0.0.1:9")) as admin:
        with pytest.raises(ModelUnavailable, match="ollama serve"):
            await admin.models()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, "http://127.0.0.1:11434"),
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("gpu", "http://gpu:11434"),
        ("gpu:1234", "http://gpu:1234"),
        ("http://gpu", "http://gpu:80"),
        ("http://gpu:11434/", "http://gpu:11434"),
        ("https://models.example.com", "https://models.example.com:443"),
        ("https://example.com/ollama/", "https://example.com:443/ollama"),
        ("[::1]:11434", "http://[::1]:11434"),
    ],
)
def test_every_form_of_ollama_host_becomes_a_url(host: str | None, expected: str) -> None:
    assert ollama_url(host) == expected
