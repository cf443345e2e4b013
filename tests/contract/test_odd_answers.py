"""Whatever a model server answers: the chat, the looks at it, the judge and the labels end in a sentence, and go on.

Embeddings have their own table: tests/unit/llm/test_embeddings_odd.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pytest
from support.loopback import listening
from support.waiting import eventually

from services.critic.judge import Judge
from services.critic.rubrics import load_rubrics
from services.critic.settings import CriticSettings
from services.memory import classify
from services.memory.engram import Engram
from services.memory.settings import MemorySettings
from shared.contracts import Usage
from shared.llm.factory import Backend, open_chat_model
from shared.llm.port import ChatRequest, Delta, Finish, ModelError, TextDelta
from shared.llm.preemption import PreemptibleChatModel
from shared.participant.background import supervised_tasks

BACKENDS: tuple[Backend, ...] = ("ollama", "openai", "google_genai")


@dataclass(frozen=True)
class Odd:
    """length: what is announced; None: the end of the connection is the end. again: sent until the client has left."""

    body: bytes = b""
    status: int = 200
    kind: str = "application/json"
    length: int | None = -1
    again: bytes = b""
    extra: str = ""


SSE, NDJSON = "text/event-stream", "application/x-ndjson"
PAGE = b"<!doctype html><html><title>Sign in</title><form action=/login></form></html>"
ODD: dict[str, Odd] = {
    "a sign-in page": Odd(PAGE, kind="text/html; charset=utf-8"),
    "a page that says it is JSON": Odd(PAGE),
    "a page as a stream": Odd(PAGE, kind=SSE),
    "a redirect to a page": Odd(PAGE, 302, "text/html", extra="location: /login\r\n"),
    "nothing": Odd(),
    "nothing as a stream": Odd(kind=SSE),
    "no content": Odd(status=204),
    "blank lines": Odd(b"\n\n\n\r\n"),
    "null": Odd(b"null\n"),
    "a number": Odd(b"7\n"),
    "a text": Odd(b'"hello"\n'),
    "a list": Odd(b"[]\n"),
    "an empty object": Odd(b"{}\n"),
    "data: null": Odd(b"data: null\n\ndata: [DONE]\n\n", kind=SSE),
    "data: a list": Odd(b"data: []\n\n", kind=SSE),
    "choices are null": Odd(b'data: {"choices": null}\n\ndata: [DONE]\n\n', kind=SSE),
    "choices are numbers": Odd(b'data: {"choices": [1, 2]}\n\n', kind=SSE),
    "a delta that is a list": Odd(b'data: {"choices": [{"delta": []}]}\n\n', kind=SSE),
    "a message that is a list": Odd(b'{"message": [], "done": true}\n', kind=NDJSON),
    "calls that are numbers": Odd(b'{"message": {"tool_calls": [1]}, "done": true}\n', kind=NDJSON),
    "an error in 200": Odd(b'{"error": "the card is overheated"}\n'),
    "an error object in 200": Odd(b'{"error": {"message": "the card is overheated", "code": 1}}\n'),
    "an error in a stream": Odd(b'data: {"error": {"message": "overheated"}}\n\n', kind=SSE),
    "an error that is null": Odd(b'{"error": null}\n'),
    "not UTF-8": Odd(b"\xff\xfe\x00{\x80\n"),
    "half an object": Odd(b'{"message": {"content": "hal'),
    "half a stream": Odd(b'data: {"choices": [{"delta": {"content": "half', kind=SSE),
    "shorter than announced": Odd(b'{"message": {"content": "x"}}\n', length=5_000),
    "no end of the first line": Odd(b"x" * 1_000, length=None, again=b"x" * 60_000),
    "blank lines for ever": Odd(b"\n", length=None, again=b"\n" * 1_000),
    "nested for ever": Odd(b'{"message":' * 20_000),
    "an error that is nested": Odd(b'{"a":' * 900 + b"1" + b"}" * 900, 400),
    "an error inside of errors": Odd(b'{"error":' * 1_000 + b"1" + b"}" * 1_000, 500),
    "a window of many digits": Odd(b'{"error": "it exceeds the context length of ' + b"9" * 5_000 + b'"}', 400),
    "half a character in an error": Odd(b'{"error": {"message": "\\ud800 is no text", "code": 1}}', 500),
    "401": Odd(b'{"error": "unauthorized"}', 401),
    "401 with a page": Odd(PAGE, 401, "text/html"),
    "403 with nothing": Odd(status=403),
    "404 of something else": Odd(b"404 page not found", 404, "text/plain"),
    "404 with nothing": Odd(status=404),
    "405": Odd(b"Method Not Allowed", 405, "text/plain"),
    "407 of a proxy": Odd(PAGE, 407, "text/html"),
    "413": Odd(PAGE, 413, "text/html"),
    "429 with a page": Odd(PAGE, 429, "text/html", extra="retry-after: 1\r\n"),
    "500 with a trace": Odd(b"Traceback (most recent call last):\n  File ...\nKeyError: 'x'\n", 500, "text/plain"),
    "500 with nothing": Odd(status=500),
    "501": Odd(b'{"error": {"message": "not implemented"}}', 501),
    "502 of a proxy": Odd(b"<h1>502 Bad Gateway</h1>", 502, "text/html"),
    "503 loading": Odd(b'{"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}', 503),
    "599": Odd(b"?", 599, "text/plain"),
}  # fmt: skip


@asynccontextmanager
async def answering(odd: Odd) -> AsyncIterator[tuple[str, list[str]]]:
    """A server that gives every request the same answer, and the requests that it got."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head.split(b" ")[1].decode())
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
            length = len(odd.body) if odd.length == -1 else odd.length
            announced = "" if length is None or odd.status == 204 else f"content-length: {length}\r\n"
            told = f"HTTP/1.1 {odd.status} X\r\ncontent-type: {odd.kind}\r\n{announced}{odd.extra}"
            writer.write(told.encode() + b"connection: close\r\n\r\n" + odd.body)
            await writer.drain()
            while odd.again:
                writer.write(odd.again)
                await writer.drain()
                await asyncio.sleep(0)

    async with listening(answer) as port:
        yield f"http://127.0.0.1:{port}", asked


def open_model(backend: Backend, url: str) -> Any:
    address = f"{url}/v1" if backend == "openai" else url
    return open_chat_model(backend, base_url=address, api_key="k")


def is_a_sentence(text: str) -> bool:
    """One that people can read: no markup, no trace, not endless."""
    return 3 < len(text) < 1_000 and "<html" not in text and "Traceback" not in text and "\n\n" not in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ODD)
async def test_a_chat_ends_in_a_model_error_with_a_sentence(backend: Backend, name: str) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    request = ChatRequest(model="m", messages=hello, max_tokens=50, idle_timeout=5, first_token_timeout=10)
    async with answering(ODD[name]) as (url, _):
        model = open_model(backend, url)
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ModelError) as caught:
                    async with aclosing(model.stream(request)) as deltas:
                        _ = [delta async for delta in deltas]
        finally:
            await model.aclose()
    assert is_a_sentence(str(caught.value)), str(caught.value)


# What servers may say of an answer that is whole otherwise.
MANY = str(10**30)
COUNTS = ['"7"', "-5", "1e300", MANY, "NaN", "[]", "{}", "true"]


def whole(backend: Backend, count: str, name: str = '"m"') -> Odd:
    """An answer with such a count of tokens and such a name of its model."""
    match backend:
        case "ollama":
            end = f'"done": true, "prompt_eval_count": {count}, "eval_count": {count}, "model": {name}'
            return Odd(f'{{"message": {{"content": "Yes."}}, {end}}}\n'.encode(), kind=NDJSON)
        case "openai":
            usage = f'"usage": {{"prompt_tokens": {count}, "completion_tokens": {count}}}, "model": {name}'
            choice = '"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]'
            return Odd(f"data: {{{choice}, {usage}}}\n\ndata: [DONE]\n\n".encode(), kind=SSE)
        case "google_genai":
            usage = f'"usageMetadata": {{"promptTokenCount": {count}, "candidatesTokenCount": {count}}}'
            said = '"candidates": [{"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}]'
            return Odd(f'data: {{{said}, {usage}, "modelVersion": {name}}}\n\n'.encode(), kind=SSE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("count", "name"), [*((count, '"m"') for count in COUNTS), ("1", "7"), ("1", "[]"), ("1", '"\\ud800"')]
)
async def test_an_answer_tells_what_can_be_written_of_it_or_ends_in_a_sentence(
    backend: Backend, count: str, name: str
) -> None:
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "Hello"}], idle_timeout=5)
    deltas: list[Delta] = []
    refused = ""
    async with answering(whole(backend, count, name)) as (url, _):
        model = open_model(backend, url)
        try:
            async with asyncio.timeout(60), aclosing(model.stream(request)) as stream:
                deltas += [delta async for delta in stream]
        except ModelError as exc:
            refused = str(exc)
        finally:
            await model.aclose()
    if refused:
        # Google's package reads the whole of an event or nothing
        assert (backend, is_a_sentence(refused)) == ("google_genai", True), refused
        return
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    assert deltas[:-1] == [TextDelta("Yes.")]
    usage = Usage(prompt_tokens=finish.prompt_tokens or 0, completion_tokens=finish.completion_tokens or 0)
    assert orjson.dumps({"usage": usage.model_dump(), "model": finish.model})
    assert min(usage.prompt_tokens, usage.completion_tokens) >= 0


# The protocol's last line; some servers say why an answer ended, and no more.
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("backend", "end"), [("ollama", b""), ("openai", b""), ("openai", DONE), ("google_genai", b"")]
)
@pytest.mark.parametrize("length", [None, 5_000], ids=["the connection stays", "the connection is cut"])
async def test_an_answer_is_whole_whatever_becomes_of_its_connection_behind_the_end(
    backend: Backend, end: bytes, length: int | None
) -> None:
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "Hello"}])
    odd = whole(backend, "7")
    odd = replace(odd, body=odd.body.removesuffix(DONE) + end)
    # a comment, or a blank line, is a sign of life and nothing else
    odd = replace(odd, length=length, again=b"" if length else b"\n" if backend == "ollama" else b":\n")
    async with answering(odd) as (url, _):
        model = open_model(backend, url)
        try:
            async with asyncio.timeout(60), aclosing(model.stream(request)) as stream:
                deltas = [delta async for delta in stream]
        finally:
            await model.aclose()
    assert deltas == [TextDelta("Yes."), Finish("stop", 7, 7, "m")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name, odd in ODD.items() if not odd.again])
async def test_a_look_at_the_server_gives_a_sentence_and_facts(backend: Backend, name: str) -> None:
    async with answering(ODD[name]) as (url, _):
        model = open_model(backend, url)
        try:
            async with asyncio.timeout(60):
                reason = await model.reachable("m")
                facts = await model.facts("m")
        finally:
            await model.aclose()
    assert reason is None or is_a_sentence(reason)
    assert facts.shown() is not None


@pytest.mark.parametrize("name", ODD)
async def test_a_judge_gives_no_grade_and_says_why(name: str) -> None:
    settings = CriticSettings(patience=0, attempts=2, grade_timeout=5, yield_above=None)
    rubric = load_rubrics(None)["realistic"]

    async def nobody() -> int:
        return 0

    async with answering(ODD[name]) as (url, _):
        model = PreemptibleChatModel(open_model("ollama", url), nobody, lambda: settings)
        try:
            async with asyncio.timeout(60):
                grade = await Judge(model, lambda: settings).grade("Question", "Answer", "", rubric)
        finally:
            await model.aclose()
    assert grade.score is None
    assert is_a_sentence(grade.feedback), grade.feedback


@pytest.mark.parametrize("name", ODD)
async def test_a_label_is_left_to_the_rules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify, "_PATIENCE", 0.0)
    settings = MemorySettings(classify_timeout=5, yield_above=None)
    engram = Engram(id="1-0:A", user_id="u", kind="turn", time=1, recorded=1, query="Who?", answer="Ada.")

    async def nobody() -> int:
        return 0

    async with answering(ODD[name]) as (url, _):
        model = PreemptibleChatModel(open_model("openai", url), nobody, lambda: settings)
        try:
            async with asyncio.timeout(60):
                with contextlib.suppress(ModelError, TimeoutError):
                    assert await classify.by_model(model, settings, engram) is None
        finally:
            await model.aclose()


async def test_a_watch_over_an_odd_server_goes_on() -> None:
    """What a participant does beside its work is never over because of an answer."""
    async with answering(ODD["a sign-in page"]) as (url, asked):
        model = open_model("openai", url)

        async def watch() -> None:
            while True:
                assert await model.reachable("m") is not None
                await asyncio.sleep(0.01)

        async with supervised_tasks(watch=watch):
            await eventually(lambda: len(asked) > 3)
        await model.aclose()
