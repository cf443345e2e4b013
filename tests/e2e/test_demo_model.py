"""The demonstration model as a process, by the adapter that the generator uses and by plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.demo_model.llama import Done, Llama
from services.demo_model.prompt import build
from services.demo_model.wheels import chat_file
from shared.llm.adapter import WiredChatModel
from shared.llm.factory import open_chat_model, open_embedding_model
from shared.llm.port import ChatRequest, Finish, ModelMissing, Notice, TextDelta, ToolCall

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-demo"
SEARCH = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Search the web for current facts.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
SEARCHED = (
    "Today's date: 2026-05-30\n\n[1] Title: Bitcoin price today\n"
    "    Snippet: Bitcoin is trading at $67,412.55 USD, up 1.2% in the last 24 hours.\n    URL: https://a.example/1\n\n"
    "[2] Title: What moves the price of Bitcoin\n"
    "    Snippet: Analysts name interest rates, flows into funds and the next halving of the reward for miners. None "
    "of these says what a coin will cost next year, and most forecasts of the past were wrong.\n"
    "    URL: https://a.example/2"
)


class Server:
    """The process; `url` and `seconds` (until it was ready)."""

    def __init__(self) -> None:
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.demo_model", "--host", "127.0.0.1", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"]
        self.seconds = time.monotonic() - started

    def stop(self) -> str:
        """What it said on stderr."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=10)[1]
        finally:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
async def chat_model(server: Server) -> AsyncIterator[WiredChatModel]:
    model = open_chat_model("ollama", base_url=server.url)
    yield model
    await model.aclose()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as client:
        yield client


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def collect(model: WiredChatModel, request: ChatRequest) -> tuple[str, list[ToolCall], Finish, list[Notice]]:
    deltas = [delta async for delta in model.stream(request)]
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    finish = deltas[-1]
    assert isinstance(finish, Finish)
    calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
    return text, calls, finish, [delta for delta in deltas if isinstance(delta, Notice)]


async def test_the_capital_of_france_is_paris_every_time(chat_model: WiredChatModel) -> None:
    for think in (True, False, False):
        request = ChatRequest(
            MODEL,
            [
                {"role": "system", "content": "You are LoCAL2."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            tools=[SEARCH],
            think=think,
        )
        text, calls, finish, notices = await collect(chat_model, request)
        assert "Paris" in text
        assert calls == []
        assert finish.reason == "stop"
        assert finish.model == MODEL
        assert (finish.prompt_tokens or 0) > 10
        assert (finish.completion_tokens or 0) > 1
        # Like a real server it refuses to think; the adapter goes on without and says so.
        assert [notice.code for notice in notices] == (["thinking_unsupported"] if think else [])


async def test_a_question_about_the_present_leads_to_a_search_and_an_answer_from_it(
    chat_model: WiredChatModel,
) -> None:
    question = {"role": "user", "content": "What is the current price of Bitcoin in USD?"}
    _, calls, _, _ = await collect(chat_model, ChatRequest(MODEL, [question], tools=[SEARCH], think=False))
    assert [(call.name, call.args) for call in calls] == [
        ("web_search", {"query": "What is the current price of Bitcoin in USD?"})
    ]
    messages = [
        question,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": calls[0].id, "name": "web_search", "args": calls[0].args}],
        },
        {"role": "tool", "tool_name": "web_search", "tool_call_id": calls[0].id, "content": SEARCHED},
    ]
    text, more, finish, _ = await collect(chat_model, ChatRequest(MODEL, messages, tools=[SEARCH], think=False))
    assert more == []
    assert "$67,412" in text
    assert (finish.prompt_tokens or 0) > 30


async def test_a_prompt_far_longer_than_the_context_is_cut_and_answered() -> None:
    """Of a model with a short context: the time that reading takes grows faster than what is read."""
    budgets: list[int] = []

    def built(budget: int) -> list[dict[str, str]]:
        budgets.append(budget)
        return build([{"role": "user", "content": "What is in the text? " + "字" * 20_000}], budget)

    llama = Llama(Path(chat_file()), n_ctx=512)
    try:
        *_, done = [piece async for piece in llama.chat(built, {"num_predict": 8}, llama.n_ctx)]
    finally:
        await llama.aclose()
    assert isinstance(done, Done)
    assert 100 < done.prompt_tokens <= 512 - 8
    # what is left room for is guessed first, and then known
    assert len(budgets) > 1


async def test_an_answer_ends_at_num_predict_and_says_so(chat_model: WiredChatModel) -> None:
    request = ChatRequest(
        MODEL, asked("Write a long story about a dragon.")["messages"], think=False, options={"num_predict": 12}
    )
    _, _, finish, _ = await collect(chat_model, request)
    assert (finish.reason, finish.completion_tokens) == ("length", 12)


async def test_the_adapter_finds_the_model_and_misses_others(chat_model: WiredChatModel) -> None:
    assert await chat_model.reachable(MODEL) is None
    assert await chat_model.reachable("gemma4:e4b") is not None
    with pytest.raises(ModelMissing):
        await collect(chat_model, ChatRequest("gemma4:e4b", asked("Hi")["messages"]))


async def test_embeddings_by_the_adapter_are_of_unit_length(server: Server) -> None:
    model = open_embedding_model("ollama", base_url=server.url)
    try:
        vectors = await model.embed("all-minilm", ["one text", "another text", "long " * 3000])
    finally:
        await model.aclose()
    assert [len(vector) for vector in vectors] == [384] * 3
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in vectors)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "after"),
    [
        pytest.param("Write a very long story about a dragon.", 1.0, id="in-the-answer"),
        # The prompt alone takes several seconds to read: this client leaves in the middle of that.
        pytest.param("What is this? " + "A dragon flew over the town. " * 180, 0.5, id="in-the-prompt"),
    ],
)
async def test_a_client_that_leaves_stops_the_generation(
    http: httpx.AsyncClient, prompt: str, after: float, stream: bool
) -> None:
    hello = asked("Hi", stream=False, options={"num_predict": 1})
    began = time.monotonic()
    await http.post("/api/chat", json=hello)
    alone = time.monotonic() - began
    body = asked(prompt, stream=stream, options={"num_predict": 2_000})
    leaver = asyncio.create_task(http.post("/api/chat", json=body))
    await asyncio.sleep(after)
    assert not leaver.done()
    leaver.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaver
    left = time.monotonic()
    answer = await http.post("/api/chat", json=hello)
    waited = time.monotonic() - left
    print(f"\nthe next answer came {waited:.2f} s after the other client had left, {alone:.2f} s on a free server")
    assert answer.json()["done"] is True
    # The other answer would take a quarter of a minute on a free machine, and in proportion on a busy one.
    assert waited < 10 + 20 * alone


async def test_requests_wait_in_line_and_each_gets_its_own_answer(http: httpx.AsyncClient) -> None:
    questions = {"What is the capital of France?": "Paris", "What is the capital of Japan?": "Tokyo"}
    answers = await asyncio.gather(
        *(http.post("/api/chat", json=asked(question, stream=False)) for question in questions for _ in range(2))
    )
    expected = [place for place in questions.values() for _ in range(2)]
    for answer, place in zip(answers, expected, strict=True):
        assert place in answer.json()["message"]["content"]


async def test_a_json_schema_holds(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    answer = await http.post("/api/chat", json=asked("Name the capital of France.", stream=False, format=schema))
    assert set(json.loads(answer.json()["message"]["content"])) == {"city"}
    broken = await http.post("/api/chat", json=asked("Hi", stream=False, format={"type": "no such type"}))
    assert broken.status_code == 400
    assert broken.json()["error"]


async def test_the_listings_say_that_it_is_a_demonstration(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/version")).json()["version"]
    names = [model["name"] for model in (await http.get("/api/tags")).json()["models"]]
    assert names == ["smollm2-135m-demo:latest", "all-minilm:latest"]
    assert [model["name"] for model in (await http.get("/api/ps")).json()["models"]] == names
    shown = (await http.post("/api/show", json={"model": MODEL})).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert "demonstration" in shown["system"]
    assert (await http.post("/api/show", json={"model": "all-minilm"})).json()["capabilities"] == ["embedding"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "nope", "messages": []}, 404, "model 'nope' not found"),
        ("/api/show", {"model": "nope"}, 404, "model 'nope' not found"),
        ("/api/embed", {"model": "nope", "input": "x"}, 404, "model 'nope' not found"),
        ("/api/chat", {"model": "all-minilm", "messages": []}, 400, "does not support chat"),
        ("/api/embed", {"model": MODEL, "input": "x"}, 400, "does not support embeddings"),
        ("/api/embed", {"model": "all-minilm", "input": "w " * 300, "truncate": False}, 400, "context length"),
        ("/api/chat", asked("x", think=True), 400, f'"{MODEL}" does not support thinking'),
        ("/api/chat", {"messages": []}, 400, "model"),
        ("/api/chat", asked("x", format="yaml"), 400, "invalid format"),
        ("/api/chat", {"model": MODEL, "messages": "x"}, 400, "messages"),
        ("/api/chat", asked("x", options={"temperature": "hot"}), 400, "temperature"),
        ("/api/chat", asked("x", options={"num_ctx": "many"}), 400, "num_ctx"),
        ("/api/chat", [1], 400, ""),
        ("/api/embed", {"model": "all-minilm", "input": [1]}, 400, "input"),
    ],
)
async def test_a_wrong_request_has_ollama_s_status_and_a_sentence(
    http: httpx.AsyncClient, path: str, body: Any, status: int, text: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]


async def test_bad_json_and_pages_from_elsewhere_are_refused(http: httpx.AsyncClient) -> None:
    assert (await http.post("/api/chat", content=b"{")).status_code == 400
    for headers in ({"origin": "http://evil.example"}, {"host": "rebound.example"}, {"origin": "null"}):
        assert (await http.get("/api/tags", headers=headers)).status_code == 403
    assert (await http.get("/api/tags", headers={"origin": "http://localhost:3000"})).status_code == 200
    assert (await http.get("/api/nothing")).status_code == 404


async def test_a_request_without_messages_only_loads(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/api/chat", json={"model": MODEL, "stream": False})).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_it_listens_once_and_stays_small(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    memory = process.memory_info().rss / 1e6
    print(f"\nready after {server.seconds:.1f} s, {memory:.0f} MB resident")
    assert [f"http://{address.ip}:{address.port}" for address in listening] == [server.url]
    # the model itself, and what long prompts of other tests have left
    assert memory < 480


def test_sigterm_ends_it_quietly_in_the_middle_of_an_answer() -> None:
    own = Server()
    with httpx.Client(base_url=own.url, timeout=30) as client:
        body = asked("Write a very long story about a dragon.", options={"num_predict": 500})
        with client.stream("POST", "/api/chat", json=body) as stream:
            next(stream.iter_lines())
            started = time.monotonic()
            said = own.stop()
    assert time.monotonic() - started < 5
    assert "Traceback" not in said
    assert "it is not a good model" in said
