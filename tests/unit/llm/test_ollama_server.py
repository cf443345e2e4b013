"""The scripted Ollama is measured by what a real one (0.32.14) sent, and our adapters by what it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from support.waiting import eventually

from shared.llm.adapter import WiredChatModel
from shared.llm.factory import Backend, open_chat_model
from shared.llm.port import (
    ChatRequest,
    ContextOverflow,
    Delta,
    Finish,
    ModelMissing,
    ModelRejected,
    StreamInterrupted,
    TextDelta,
    ThinkingDelta,
)
from shared.testing.model_server import ScriptedModelServer
from shared.testing.ollama_server import CRASHED, DEFAULT_CONTEXT, ScriptedOllama, crashed
from shared.testing.script import Script

RECORDED = Path(__file__).parents[2] / "support" / "ollama_wire"
ASK = ChatRequest(model="small", messages=[{"role": "user", "content": "hi"}], num_ctx=2048)
ENDLESS = {"respond": {"text": "word " * 500, "pace": 0.02}}


def recorded(name: str) -> tuple[int, Any, list[Any]]:
    """Status, request body, and the lines of a recorded exchange."""
    lines = [orjson.loads(line) for line in (RECORDED / f"{name}.ndjson").read_bytes().splitlines()]
    body = next(line["request"]["body"] for line in lines if "request" in line)
    status = next(line["response"]["status"] for line in lines if "response" in line)
    return status, body, [line.get("line", line.get("text")) for line in lines if "line" in line or "text" in line]


def form(value: Any) -> Any:
    """Names and types, whatever the values: of a list, those that each of its entries has."""
    if isinstance(value, dict):
        return {name: form(one) for name, one in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def within(part: Any, whole: Any) -> bool:
    """Whether a form has nothing that the other one does not have."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and within(one, whole[name]) for name, one in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return all(within(one, whole[0]) for one in part)
    return bool(part == whole)


@asynccontextmanager
async def ollama(*rules: Any, **values: Any) -> AsyncIterator[ScriptedOllama]:
    async with ScriptedOllama(Script.model_validate({"rules": list(rules)}), **values) as server:
        yield server


@asynccontextmanager
async def asked(server: ScriptedModelServer, backend: Backend = "ollama") -> AsyncIterator[WiredChatModel]:
    model = open_chat_model(backend, base_url=server.url + ("/v1" if backend == "openai" else ""), api_key="key")
    try:
        yield model
    finally:
        await model.aclose()


async def answer(model: WiredChatModel, request: ChatRequest = ASK) -> list[Delta]:
    async with aclosing(model.stream(request)) as deltas:
        return [delta async for delta in deltas]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


async def test_its_answers_have_the_form_of_the_real_ones() -> None:
    async with (
        ollama(window=8192) as server,
        asked(server) as model,
        httpx.AsyncClient(base_url=server.url, verify=False) as http,
    ):
        await answer(model)
        for name, reply in (
            ("ps", await http.get("/api/ps")),
            ("v1-models", await http.get("/v1/models")),
            ("error-403-host", await http.get("/api/version", headers={"host": "ollama"})),
        ):
            status, _, lines = recorded(name)
            assert reply.status_code == status
            if not lines[0]:
                assert reply.content == b""
            else:
                assert within(form(reply.json()), form(lines[0])), name
        shown = (await http.post("/api/show", json={"model": "small"})).json()
        assert shown["model_info"]["gemma4.context_length"] == 8192
        _, _, (real,) = recorded("show")
        assert "qwen2.context_length" in real["model_info"]
        assert shown.keys() - {"parameters"} <= real.keys()


async def test_its_refusal_is_worded_as_the_real_one_and_ours_is_the_same_for_both() -> None:
    status, body, (line,) = recorded("overflow-truncate-false")
    long = [{"role": "user", "content": "harbour " * 1515}]
    async with ollama(window=8192) as server, httpx.AsyncClient(base_url=server.url, verify=False) as http:
        refused = await http.post("/api/chat", json={**body, "messages": long})
    assert refused.status_code == status
    assert refused.json() == line


@pytest.mark.parametrize(
    ("name", "said"),
    [("error-midstream-runner-killed", CRASHED), ("error-midstream-runner-killed-stale-text", crashed(9011, 8192))],
)
async def test_a_killed_runner_ends_an_answer_as_the_real_one_does(name: str, said: str) -> None:
    assert recorded(name)[2][-1] == {"error": said}
    async with ollama(ENDLESS) as server, asked(server) as model, aclosing(model.stream(ASK)) as deltas:
        await anext(deltas)
        server.crash(said)
        with pytest.raises(StreamInterrupted, match="crashed") as caught:
            _ = [delta async for delta in deltas]
        assert "9011" not in str(caught.value)
        server.set_rules([])
        assert text(await answer(model)) == "You asked: hi"


async def test_a_prompt_beyond_the_clamped_context_is_refused_and_teaches_it() -> None:
    long = replace(ASK, num_ctx=32_000, messages=[{"role": "user", "content": "x" * 40_000}])
    async with ollama(window=8192) as server, asked(server) as model:
        with pytest.raises(ContextOverflow) as caught:
            await answer(model, long)
        assert (caught.value.window, caught.value.prompt) == (8192, 10_001)
        assert (await model.facts("small")).context(32_000) == 8192


async def test_the_window_is_known_before_anything_is_refused() -> None:
    async with ollama(window=8192) as server, asked(server) as model:
        assert (await model.facts("small")).context(32_000) == 8192
        await answer(model, replace(ASK, num_ctx=32_000))
        assert server.loads == [("small", 8192)]


async def test_who_calls_it_by_another_name_is_told_of_the_address_and_not_of_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ollama() as server:
        port = server.url.rpartition(":")[2]
        loop = asyncio.get_running_loop()
        resolved = await loop.getaddrinfo("127.0.0.1", int(port))
        monkeypatch.setattr(loop, "getaddrinfo", lambda *_, **__: _done(resolved))
        model = open_chat_model("ollama", base_url=f"http://ollama:{port}")
        with pytest.raises(ModelRejected, match=r"OLLAMA_HOST=0\.0\.0\.0"):
            await answer(model)
        complaint = await model.reachable("small")
        assert complaint is not None
        assert "OLLAMA_HOST=0.0.0.0" in complaint
        assert "key" not in complaint
        await model.aclose()


async def _done(value: Any) -> Any:
    return value


async def test_one_slot_answers_one_after_the_other_and_who_leaves_the_line_is_not_answered() -> None:
    async with ollama(ENDLESS) as server, asked(server) as model:
        first = asyncio.create_task(answer(model))
        await server.wait_until(lambda one: one.streaming == 1, 20)
        second = asyncio.create_task(answer(model))
        third = asyncio.create_task(answer(model))
        await server.wait_until(lambda one: len(one.requests) == 3, 20)
        await server.wait_until(lambda one: one.requests[2].outcome == "waiting", 20)
        assert [one.outcome for one in server.requests] == ["running", "waiting", "waiting"]
        second.cancel()
        await server.wait_until(lambda one: one.requests[1].outcome == "aborted", 20)
        first.cancel()
        await server.wait_until(lambda one: one.requests[2].outcome == "running", 20)
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        await server.wait_until(lambda one: one.streaming == 0, 20)


async def test_a_slot_reads_only_what_it_does_not_hold() -> None:
    async with ollama(reading=100.0) as server, asked(server) as model:
        clock = asyncio.get_running_loop().time
        talk = [{"role": "user", "content": "x" * 400}]
        began = clock()
        await answer(model, replace(ASK, messages=talk))
        assert clock() - began >= 1.0
        said = [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
        await answer(model, replace(ASK, messages=[*talk, *said]))
        at, ended = server.requests[1].at, server.requests[1].ended_at
        assert ended is not None
        assert ended - at >= 0.05
        # another conversation took its place
        await answer(model, replace(ASK, messages=[{"role": "user", "content": "w" * 400}]))
        began = clock()
        await answer(model, replace(ASK, messages=talk))
        assert clock() - began >= 1.0


async def test_a_missing_model_comes_with_one_that_is_there() -> None:
    async with ollama() as server, asked(server) as model:
        server.set_rules(Script.model_validate({"models": {"qwen:latest": ["tools"]}}))
        with pytest.raises(ModelMissing, match=r"ollama pull small; or .*: LOCAL2_MODEL=qwen:latest$"):
            await answer(model)
        server.set_rules(Script.model_validate({"models": {}}))
        with pytest.raises(ModelMissing, match=r"ollama pull small$"):
            await answer(model)


# ── behind /v1 ───────────────────────────────────────────────────────────────────────────────────────────────────

TALK = [
    message
    for number in range(12)
    for message in ({"role": "user", "content": f"{number} " + "x" * 2_000}, {"role": "assistant", "content": "ok"})
]


async def test_v1_of_an_ollama_cuts_a_conversation_without_a_word() -> None:
    """Why it is not used."""
    body = {"model": "small", "messages": [*TALK, {"role": "user", "content": "last"}], "stream": False}
    async with ollama() as server, httpx.AsyncClient(base_url=server.url, verify=False) as http:
        reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["usage"]["prompt_tokens"] < DEFAULT_CONTEXT < sum(len(said["content"]) for said in TALK) // 4


async def test_an_ollama_behind_v1_is_asked_by_its_own_protocol() -> None:
    async with ollama({"respond": {"thinking": "hm", "text": "yes"}}) as server, asked(server, "openai") as model:
        talk = [*TALK, {"role": "user", "content": "last"}]
        deltas = await answer(model, replace(ASK, messages=talk, num_ctx=32_000, think=False))
        (received,) = server.requests
        assert received.path == "/api/chat"
        assert received.body["options"]["num_ctx"] == 32_000
        assert not any(isinstance(delta, ThinkingDelta) for delta in deltas)
        assert isinstance(deltas[-1], Finish)
        # nothing was left out
        assert deltas[-1].prompt_tokens == sum(len(said["content"]) for said in talk) // 4 + 1
        assert await model.reachable("small") is None
        assert (await model.facts("small")).server == "Ollama"


class Elsewhere(ScriptedModelServer):
    """Something else behind the address, which answers some of Ollama's paths."""

    def __init__(self, **answers: Any) -> None:
        super().__init__([{"respond": {"text": "in OpenAI's protocol"}}])

        async def answer(request: Request) -> Response:
            found = answers.get(request.url.path.rpartition("/")[2])
            return HTMLResponse("<html>not found</html>", 404) if found is None else found

        own = [route for route in self.app.router.routes if getattr(route, "path", "").startswith("/v1/chat")]
        self.app = Starlette(routes=[*own, Route("/api/{path}", answer)])


@pytest.mark.parametrize(
    "answers",
    [
        {},
        # Open WebUI, whose console answers every other path
        {"version": JSONResponse({"version": "0.12.0"}), "tags": HTMLResponse("<html>Open WebUI</html>")},
        {"tags": JSONResponse({"models": []})},
        {"version": JSONResponse("0.1"), "tags": JSONResponse([])},
        {"version": JSONResponse({"version": 1}), "tags": JSONResponse({"models": None})},
    ],
    ids=["nothing", "Open WebUI", "a list alone", "other JSON", "other values"],
)
async def test_others_are_asked_by_openais_protocol(answers: dict[str, Any]) -> None:
    async with Elsewhere(**answers) as server, asked(server, "openai") as model:
        assert text(await answer(model)) == "in OpenAI's protocol"


async def test_ollama_that_starts_late_behind_v1_is_found() -> None:
    async with ScriptedOllama() as reserved:
        port = int(reserved.url.rpartition(":")[2])
    model = open_chat_model("openai", base_url=f"http://127.0.0.1:{port}/v1")
    assert await model.reachable("small") is not None
    async with ScriptedOllama(port=port) as late:

        async def found() -> bool:
            assert text(await answer(model)) == "You asked: hi"
            return late.requests[-1].path == "/api/chat"

        await eventually(found, every=0.5)
    await model.aclose()
