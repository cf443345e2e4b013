"""The scripted model server itself: what tests rely on when they use it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from shared.testing.catalog import embedding
from shared.testing.model_server import ScriptedModelServer
from shared.testing.script import STORIES, Script, load_script

CHAT: dict[str, Any] = {"model": "gemma4:e4b", "messages": [{"role": "user", "content": "What is new?"}]}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
        yield client


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in response.content.split(b"\n") if line]


async def test_a_chat_streams_lines_in_ollamas_form(http: httpx.AsyncClient) -> None:
    rule = {"respond": {"thinking": "hm", "text": "all good", "tool_calls": [{"name": "f", "args": {"a": 1}}]}}
    async with ScriptedModelServer([rule]) as server:
        response = await http.post(f"{server.url}/api/chat", json=CHAT)
    parts = lines(response)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert parts[0]["message"]["thinking"] == "hm"
    assert [part["message"]["content"] for part in parts] == ["", "all ", "good", "", ""]
    call = parts[3]["message"]["tool_calls"][0]
    assert call["id"].startswith("call_")
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}
    assert [part["done"] for part in parts] == [False] * 4 + [True]
    assert parts[-1]["done_reason"] == "stop"
    assert parts[-1]["eval_count"] == 4


async def test_the_same_answer_comes_whole_when_not_streamed(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer([{"respond": {"thinking": "hm", "text": "all good"}}]) as server:
        ollama = (await http.post(f"{server.url}/api/chat", json={**CHAT, "stream": False})).json()
        openai = (await http.post(f"{server.url}/v1/chat/completions", json=CHAT)).json()
    assert (ollama["message"]["content"], ollama["message"]["thinking"], ollama["done"]) == ("all good", "hm", True)
    assert openai["choices"][0]["message"] == {"role": "assistant", "content": "all good", "reasoning_content": "hm"}
    assert openai["choices"][0]["finish_reason"] == "stop"


async def test_without_a_rule_the_question_is_echoed(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer() as server:
        answers = await asyncio.gather(
            *(
                http.post(
                    f"{server.url}/api/chat",
                    json={**CHAT, "stream": False, "messages": [{"role": "user", "content": f"question {n}"}]},
                )
                for n in range(20)
            )
        )
    assert [a.json()["message"]["content"] for a in answers] == [f"You asked: question {n}" for n in range(20)]


async def test_a_rule_plays_only_as_often_as_it_says(http: httpx.AsyncClient) -> None:
    rules = [{"times": 2, "respond": {"text": "first"}}, {"respond": {"text": "then"}}]
    async with ScriptedModelServer(rules) as server:
        got = [(await http.post(f"{server.url}/api/chat", json={**CHAT, "stream": False})).json() for _ in range(3)]
    assert [part["message"]["content"] for part in got] == ["first", "first", "then"]


async def test_requests_and_rules_can_be_seen_and_changed_over_http(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer() as server:
        given = await http.post(f"{server.url}/script/rules", content="- respond: {text: from yaml}")
        assert given.json() == {"rules": 1}
        answer = await http.post(f"{server.url}/api/chat", json={**CHAT, "stream": False})
        assert answer.json()["message"]["content"] == "from yaml"
        refused = await http.post(f"{server.url}/script/rules", json=[{"respond": {"tetx": "typo"}}])
        assert refused.status_code == 422
        assert "tetx" in refused.json()["error"]
        shown = (await http.get(f"{server.url}/script/requests")).json()
        assert [(r["query"], r["path"], r["outcome"]) for r in shown] == [("What is new?", "/api/chat", "done")]
        state = (await http.get(f"{server.url}/script/state")).json()
        assert state == {"connections": 1, "streaming": 0, "aborted": 0, "requests": 1}
        assert (await http.delete(f"{server.url}/script/requests")).json() == []


async def test_a_client_that_leaves_is_seen_with_its_time(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer([{"respond": {"text": "word " * 500, "pace": 0.01}}]) as server:
        async with http.stream("POST", f"{server.url}/api/chat", json=CHAT) as response:
            await anext(response.aiter_bytes())
            assert server.streaming == 1
        await server.wait_until(lambda s: bool(s.aborted), timeout=1)
        assert server.streaming == 0
        left = server.aborted[0]
    assert left.ended_at is not None
    assert left.ended_at >= left.at


async def test_the_server_stops_at_once_with_streams_open(http: httpx.AsyncClient) -> None:
    server = ScriptedModelServer([{"respond": {"fault": {"kind": "stall"}}}])
    await server.__aenter__()
    task = asyncio.create_task(http.post(f"{server.url}/api/chat", json=CHAT))
    await server.wait_until(lambda s: s.streaming == 1)
    async with asyncio.timeout(1):
        await server.__aexit__()
    with pytest.raises(httpx.TransportError):
        await task


async def test_embeddings_are_the_same_for_the_same_text_and_nearer_for_shared_words(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer() as server:
        body = {"model": "nomic-embed-text", "input": ["the capital of France", "capital of Spain", "banana bread"]}
        first = (await http.post(f"{server.url}/api/embed", json=body)).json()["embeddings"]
        again = (await http.post(f"{server.url}/api/embed", json=body)).json()["embeddings"]
    assert first == again
    near, far = (sum(a * b for a, b in zip(first[0], other, strict=True)) for other in first[1:])
    assert near > far + 0.3
    assert sum(x * x for x in embedding("")) == pytest.approx(1.0)


async def test_models_and_their_abilities_are_those_of_the_script(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer(Script(models={"a:1b": ["tools"], "b": []})) as server:
        tags = (await http.get(f"{server.url}/api/tags")).json()
        assert [entry["name"] for entry in tags["models"]] == ["a:1b", "b:latest"]
        shown = await http.post(f"{server.url}/api/show", json={"model": "a:1b"})
        assert shown.json()["capabilities"] == ["completion", "tools"]
        gone = await http.post(f"{server.url}/api/show", json={"model": "c"})
        assert (gone.status_code, gone.json()) == (404, {"error": "model 'c' not found"})
        assert (await http.get(f"{server.url}/api/version")).json()["version"]
        assert (await http.get(f"{server.url}/api/ps")).json() == {"models": []}
        listed = (await http.get(f"{server.url}/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["a:1b", "b:latest"]


async def test_many_streams_keep_their_pace_together(http: httpx.AsyncClient) -> None:
    async with ScriptedModelServer([{"respond": {"text": "word " * 25, "pace": 0.02}}]) as server:

        async def one() -> int:
            return len(lines(await http.post(f"{server.url}/api/chat", json=CHAT)))

        began = asyncio.get_running_loop().time()
        counts = await asyncio.gather(*(one() for _ in range(64)))
        took = asyncio.get_running_loop().time() - began
    assert counts == [26] * 64
    assert took >= 0.48  # 24 pauses: a stream is never faster than its pace


async def test_the_program_serves_the_stories_until_it_is_stopped(http: httpx.AsyncClient) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shared.testing.model_server", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            url = (await process.stdout.readline()).decode().split()[-1]
        body = {**CHAT, "stream": False, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = (await http.post(f"{url}/api/chat", json=body)).json()
        assert "Paris" in answer["message"]["content"]
        assert answer["message"]["thinking"]
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            code = await process.wait()
    assert code == 0


class Conversation:
    """Asks the stories' script as an agent loop would: tools are run by canned results."""

    def __init__(self, http: httpx.AsyncClient, url: str, results: dict[str, str]) -> None:
        self._http = http
        self._url = url
        self._results = results
        self.messages: list[dict[str, Any]] = []
        self.called: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, query: str) -> str:
        self.messages.append({"role": "user", "content": query})
        tools = [{"type": "function", "function": {"name": name}} for name in self._results]
        for _ in range(5):
            body = {**CHAT, "stream": False, "messages": self.messages, "tools": tools}
            message = (await self._http.post(f"{self._url}/api/chat", json=body)).json()["message"]
            assert message["thinking"]
            self.messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for call in message["tool_calls"]:
                function = call["function"]
                self.called.append((function["name"], function["arguments"]))
                content = self._results[function["name"]]
                self.messages.append({"role": "tool", "tool_name": function["name"], "content": content})
        raise AssertionError("the script never answers")


HITS = (
    "Today's date: 2026-05-30\n\n[1] Title: Big news\n    Snippet: A model was released for $5 at $67,432.18 USD.\n"
    "    URL: http://127.0.0.1:9/page?a=1\n\n[2] Title: Other\n    Snippet: x\n    URL: https://b.example/"
)
PAGE = "URL: http://127.0.0.1:9/page\nExtracted text:\nHow LoCAL2 calls tools\n\nIt publishes a request.\n"


@pytest.mark.parametrize(
    ("queries", "results", "called", "contains"),
    [
        (["What is the capital of France?"], {"web_search": HITS}, [], ["Paris"]),
        (["Tell me about the Python GIL."], {}, [], ["Global Interpreter Lock"]),
        (["Tell me about the Python GIL.", "Why was it introduced?"], {}, [], ["reference counting"]),
        (["Why was it introduced?"], {}, [], ["What do you mean by it?"]),
        (
            ["What major AI news broke this week?"],
            {"web_search": HITS},
            [("web_search", {"query": "major AI news this week"})],
            ["Big news", "http://127.0.0.1:9/page?a=1"],
        ),
        (
            ["What is the current price of Bitcoin in USD?"],
            {"web_search": HITS, "web_fetch": PAGE},
            [("web_search", {"query": "current Bitcoin price USD"})],
            ["$"],
        ),
        (
            ["Summarize the content of the top result for: LoCAL2 Gemma tool calling"],
            {"web_search": HITS, "web_fetch": PAGE},
            [
                ("web_search", {"query": "LoCAL2 Gemma tool calling"}),
                ("web_fetch", {"url": "http://127.0.0.1:9/page?a=1"}),
            ],
            ["How LoCAL2 calls tools"],
        ),
        (
            ["Fetch and summarize the content at http://127.0.0.1:9/page."],
            {"web_search": HITS, "web_fetch": PAGE},
            [("web_fetch", {"url": "http://127.0.0.1:9/page"})],
            ["How LoCAL2 calls tools"],
        ),
        (
            ["Fetch and summarize the content at http://127.0.0.1:9/page"],
            {"web_fetch": "[tool error: fetch failed: 404]"},
            [("web_fetch", {"url": "http://127.0.0.1:9/page"})],
            ["could not", "404"],
        ),
        (
            ["What do you remember about Australian geography?"],
            {
                "search_memory": "[Memory recall — 2026-05-31]\n\n1. (relevance: 0.91) 2026-05-30\n   Q: The capital\n"
                "   A: The capital of Australia is Canberra."
            },
            [("search_memory", {"query": "capital of Australia"})],
            ["Canberra"],
        ),
        (
            ["how do I like my coffee?"],
            {"search_memory": "No memories found."},
            [("search_memory", {"query": "how the user likes coffee"})],
            ["do not remember"],
        ),
        (
            ["Please remember my preferred language is Elixir.", "What language do I prefer?"],
            {
                "save_topic": "Memory saved: user.preferred_language",
                "recall_topic": "[Memory: user.preferred_language]\nThe user's preferred language is Elixir.",
            },
            [
                (
                    "save_topic",
                    {"topic": "user.preferred_language", "content": "The user's preferred language is Elixir."},
                ),
                ("recall_topic", {"topic": "user.preferred_language"}),
            ],
            ["Elixir"],
        ),
        (["What is the boiling point of water at sea level?"], {"web_search": HITS}, [], ["100"]),
        (["Sing something."], {"web_search": HITS}, [], ["You asked: Sing something."]),
    ],
)
async def test_the_stories_script_plays_every_story(
    http: httpx.AsyncClient,
    queries: list[str],
    results: dict[str, str],
    called: list[tuple[str, dict[str, Any]]],
    contains: list[str],
) -> None:
    async with ScriptedModelServer(load_script(STORIES.read_text(encoding="utf-8"))) as server:
        conversation = Conversation(http, server.url, results)
        for query in queries:
            answer = await conversation.ask(query)
    assert conversation.called == called
    for text in contains:
        assert text in answer
