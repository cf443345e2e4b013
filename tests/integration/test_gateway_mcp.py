"""/mcp: the agent, its tools and a user's own things for programs that speak the Model Context Protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field
from support.http_gateway import ADMIN_KEY, FakeGenerator, Site, client, gateway_settings, generating, serving
from support.memories import remembering, response
from support.services import announced, running
from support.waiting import eventually

from services.gateway.http.gateway import MOST_CALLS
from services.web_search.service import WebSearchSettings
from services.web_search.service import app as web_search
from shared.contracts import ToolRequest
from shared.participant.service import Context, Service, Work
from shared.participant.settings import Settings
from shared.participant.tool import Tool, ToolResult, open_tools


@pytest.fixture
async def fake(redis_url: str, tmp_path: Path) -> AsyncIterator[FakeGenerator]:
    async with generating(redis_url, tmp_path) as one:
        yield one


@pytest.fixture
async def site(redis_url: str, tmp_path: Path, fake: FakeGenerator) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path, client_gone_seconds=0)) as one:
        yield one


@asynccontextmanager
async def speaking(site: Site, key: str = ADMIN_KEY, mode: str = "auto") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=20, trust_env=False) as http,
        Client(streamable_http_client(f"{site.url}/mcp", http_client=http), mode=mode, cache=None) as one,
    ):
        yield one


def text(result: Any) -> str:
    (block,) = result.content
    return str(block.text)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_question_is_answered_with_progress(site: Site, mode: str) -> None:
    told: list[str] = []

    async def progress(_done: float, _total: float | None, message: str | None) -> None:
        told.append(str(message))

    async with speaking(site, mode=mode) as one:
        assert [tool.name for tool in (await one.list_tools()).tools] == ["ask"]
        done = await one.call_tool(
            "ask", {"question": "tool for it", "session_id": "s-mcp"}, progress_callback=progress
        )
        assert (text(done), done.is_error) == ("You said: for it", False)
        assert done.structured_content["session_id"] == "s-mcp"
        assert told == [
            "begun",
            "thinking",
            "answering",
            'web_search {"query":"x"}',
            "web_search has answered",
            "answering",
        ]
        # it is the user's own session, and goes on
        again = await one.call_tool("ask", {"question": "say more", "session_id": "s-mcp"})
        assert text(again) == "You said: more"
        resources = (await one.list_resources()).resources
        assert [str(one.uri) for one in resources] == ["local2://sessions/s-mcp"]
        (contents,) = (await one.read_resource("local2://sessions/s-mcp")).contents
        session = orjson.loads(contents.text)  # type: ignore[union-attr]
        assert [turn["query"] for turn in session["turns"]] == ["tool for it", "say more"]
        templates = (await one.list_resource_templates()).resource_templates
        assert [template.uri_template for template in templates] == [
            "local2://sessions/{session_id}",
            "local2://engrams/{engram_id}",
        ]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_cancelled_question_is_stopped(site: Site, fake: FakeGenerator, mode: str) -> None:
    async with speaking(site, mode=mode) as one:
        calling = asyncio.create_task(one.call_tool("ask", {"question": "slow"}))
        await eventually(lambda: fake.started, what="the question is being answered")
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        (query_id,) = fake.started

        async def cancelled() -> bool:
            return bool((await site.http.get(f"/queries/{query_id}")).json()["state"] == "cancelled")

        await eventually(cancelled, what="the run is cancelled")


async def test_a_question_whose_client_is_gone_is_stopped_after_a_while(
    redis_url: str, tmp_path: Path, fake: FakeGenerator
) -> None:
    """As clients of the older protocols leave: the connection ends, without a word."""
    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    params = {"name": "ask", "arguments": {"question": "slow"}}
    headers = {"Accept": "application/json, text/event-stream"}
    async with serving(gateway_settings(redis_url, tmp_path, client_gone_seconds=0.1)) as site:
        async with client(site.url, ADMIN_KEY) as http:
            calling = asyncio.create_task(http.post("/mcp", json={**ask, "params": params}, headers=headers))
            await eventually(lambda: fake.started, what="the question is being answered")
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

        async def cancelled() -> bool:
            found = await site.http.get(f"/queries/{fake.started[0]}")
            return bool(found.json()["state"] == "cancelled")

        await eventually(cancelled, what="the run is cancelled")


async def test_what_goes_wrong_is_a_result_that_a_model_can_read(site: Site) -> None:
    async with speaking(site) as one:
        for args, said in (
            ({"question": "fail model_error"}, "it failed: model_error"),
            ({}, "question: Input should be a valid string"),
            ({"question": "x", "session_id": "not an id"}, "session_id: "),
            ({"question": "x", "model": "y"}, "ask has no argument model"),
        ):
            failed = await one.call_tool("ask", args)
            assert failed.is_error
            assert said in text(failed)
        gone = await one.call_tool("web_search", {"query": "x"})
        assert gone.is_error
        for calling in (one.call_tool("nothing", {}), one.read_resource("local2://sessions/nowhere"),
                        one.read_resource("file:///etc/passwd"), one.list_resources(cursor="sessions:x")):  # fmt: skip
            with pytest.raises(MCPError):
                await calling


async def test_too_many_questions_are_refused_in_words(redis_url: str, tmp_path: Path, fake: FakeGenerator) -> None:
    async with (
        serving(gateway_settings(redis_url, tmp_path, max_session_backlog=1)) as site,
        speaking(site) as one,
    ):
        first = asyncio.create_task(one.call_tool("ask", {"question": "slow", "session_id": "busy"}))
        await eventually(lambda: fake.started)
        second = await one.call_tool("ask", {"question": "say it", "session_id": "busy"})
        assert second.is_error
        assert text(second) == "too many queries of this session are waiting; try again in 2 s"
        fake.gate.set()
        assert text(await first) == "You said: slow"


async def test_tools_run_over_the_bus_for_the_user(site: Site, redis_url: str, tmp_path: Path) -> None:
    settings = WebSearchSettings(provider="mock", redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=0.5)
    async with running(web_search, settings):
        await announced(redis_url, "web_search")
        async with speaking(site) as one:

            async def offered() -> list[str]:
                return [tool.name for tool in (await one.list_tools()).tools]

            async def both() -> bool:
                return await offered() == ["ask", "web_search"]

            await eventually(both, what="the tool is offered")
            found = await one.call_tool("web_search", {"query": "LoCAL2"})
            assert text(found).startswith("Today's date: ")
            wrong = await one.call_tool("web_search", {})
            assert (wrong.is_error, text(wrong)) == (True, "missing query argument")


class Found(BaseModel):
    """Find something of the user's. Call it in tests."""

    query: str = Field(min_length=1)


@asynccontextmanager
async def finding(context: Context[Settings]) -> AsyncIterator[Sequence[Work]]:
    """The tools of memory and knowledge, which say whose they are asked for."""

    async def find(args: Found, request: ToolRequest) -> ToolResult:
        if args.query == "slow":
            await asyncio.sleep(2)
        return ToolResult(f"{request.tool} of {request.user_id}: {args.query}")

    @asynccontextmanager
    async def tools(_settings: Settings) -> AsyncIterator[Sequence[Tool[Any]]]:
        yield [Tool(name, Found, find) for name in (*FOUND, "shut")]

    async with open_tools(context, tools) as work:
        yield work


FOUND = ("search_documents", "search_knowledge_graph", "search_memory")


async def test_what_a_user_has_is_found_in_documents_and_knowledge_too(
    site: Site, redis_url: str, tmp_path: Path
) -> None:
    settings = Settings(redis_url=redis_url, data_dir=tmp_path, heartbeat=0.2, drain=0.5)
    async with running(Service("finder", Settings, finding), settings):
        await announced(redis_url, "finder")
        async with await site.key("ann") as ann:
            key = ann.headers["Authorization"].removeprefix("Bearer ")
            async with speaking(site, key) as one:

                async def offered() -> bool:
                    return sorted(tool.name for tool in (await one.list_tools()).tools) == ["ask", *FOUND]

                await eventually(offered, what="the tools are offered, and no other")
                for name in FOUND:
                    assert text(await one.call_tool(name, {"query": "x"})) == f"{name} of ann: x"
                assert text(await one.call_tool("recall_memory", {"query": "x"})) == "search_memory of ann: x"
                with pytest.raises(MCPError, match="unknown tool"):
                    await one.call_tool("shut", {"query": "x"})
                slow = [one.call_tool("search_memory", {"query": "slow"}) for _ in range(MOST_CALLS + 1)]
                (refused,) = [each for each in await asyncio.gather(*slow) if each.is_error]
                assert f"{MOST_CALLS} tool calls of yours are in progress" in text(refused)


async def test_engrams_that_were_not_shown_are_no_resources(site: Site, redis_url: str, tmp_path: Path) -> None:
    async with remembering(redis_url, tmp_path / "memory") as memory, speaking(site) as one:
        answers = [response("Tea?", "Mint.", user_id="admin", query_id="1-1", respondent_id=name) for name in "AB"]
        await memory.publish(*answers)
        await memory.idle()
        found = (await one.list_resources(cursor="engrams:")).resources
        assert [str(each.uri) for each in found] == ["local2://engrams/1-1%3AA"]
        with pytest.raises(MCPError, match="no such resource"):
            await one.read_resource("local2://engrams/1-1%3AB")


async def test_each_sees_its_own_and_nobody_without_a_key_anything(site: Site) -> None:
    async with speaking(site) as one:
        await one.call_tool("ask", {"question": "say it", "session_id": "of-the-admin"})
    ann = await site.key("ann")
    async with ann, speaking(site, ann.headers["Authorization"].removeprefix("Bearer ")) as other:
        assert (await other.list_resources()).resources == []
        with pytest.raises(MCPError, match="no such resource"):
            await other.read_resource("local2://sessions/of-the-admin")

    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    headers = {"Accept": "application/json, text/event-stream"}
    async with client(site.url, None) as nobody:
        assert (await nobody.post("/mcp", json=ping, headers=headers)).status_code == 401
    post = site.http.post
    assert (await post("/mcp", json=ping, headers={**headers, "Origin": "http://localhost:6274"})).status_code == 200
    for origin in ("https://evil.example.com", "http://[localhost"):
        refused = await post("/mcp", json=ping, headers={**headers, "Origin": origin})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert (await post("/mcp", content="{", headers={"Content-Type": "application/json"})).status_code == 400
    assert (await post("/mcp", json=["x" * 5_000_000], headers=headers)).status_code == 413
    assert (await site.http.get("/mcp")).status_code == 405
