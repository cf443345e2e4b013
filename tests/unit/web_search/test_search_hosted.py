"""Brave and Tavily over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import SecretStr

from services.web_search.hits import Hit
from services.web_search.hosted import Brave, Tavily
from shared.errors import ToolError

KEY = SecretStr("k-123")


async def test_brave_is_asked_with_its_key(engine: Any, http: Any) -> None:
    engine.answer = {
        "web": {"results": [{"title": "A", "description": "<strong>B</strong>", "url": "https://a.example/"}]}
    }
    hits = await Brave(http, KEY, 5, engine.url).search("tides", 5)
    assert hits == [Hit("A", "B", "https://a.example/")]
    assert engine.paths == ["/res/v1/web/search"]
    assert engine.query == {"q": "tides", "count": "5"}
    assert "x-subscription-token: k-123\r\n" in engine.heads[0].lower()


async def test_brave_gets_no_longer_query_than_it_takes(engine: Any, http: Any) -> None:
    await Brave(http, KEY, 5, engine.url).search("word " * 200, 5)
    assert len(engine.query["q"].split()) == 50
    await Brave(http, KEY, 5, engine.url).search("w" * 1_000, 5)
    assert len(engine.query["q"]) == 400


@pytest.mark.parametrize("answer", [{}, {"web": None}, {"web": {"results": None}}, {"web": []}])
async def test_brave_without_web_results_is_nothing_found(answer: Any, engine: Any, http: Any) -> None:
    engine.answer = answer
    assert await Brave(http, KEY, 5, engine.url).search("x", 5) == []


async def test_tavily_is_asked_with_its_key(engine: Any, http: Any) -> None:
    engine.answer = {"results": [{"title": "A", "content": "page " * 500, "url": "https://a.example/", "score": 1}]}
    (hit,) = await Tavily(http, KEY, 5, engine.url).search("tides", 4)
    assert hit.url == "https://a.example/"
    assert len(hit.snippet) <= 600
    assert engine.paths == ["/search"]
    assert json.loads(engine.body) == {"query": "tides", "max_results": 4, "search_depth": "basic"}
    assert "authorization: bearer k-123\r\n" in engine.heads[0].lower()


@pytest.mark.parametrize(("provider", "variable"), [(Brave, "BRAVE_API_KEY"), (Tavily, "TAVILY_API_KEY")])
class TestKeys:
    @pytest.mark.parametrize("key", [None, SecretStr(""), SecretStr("  ")])
    async def test_a_missing_key_says_what_to_set(
        self, key: SecretStr | None, provider: Any, variable: str, engine: Any, http: Any
    ) -> None:
        with pytest.raises(ToolError, match=rf"^search failed: .* set {variable} in the environment of web_search$"):
            await provider(http, key, 5, engine.url).search("x", 5)
        assert engine.paths == []

    @pytest.mark.parametrize("status", [401, 403])
    async def test_a_refused_key_is_named_but_never_shown(
        self, status: int, provider: Any, variable: str, engine: Any, http: Any
    ) -> None:
        engine.status = status
        with pytest.raises(ToolError) as caught:
            await provider(http, KEY, 5, engine.url).search("x", 5)
        assert str(caught.value) == f"search failed: {status} (the key in {variable} was refused)"

    async def test_a_key_that_would_change_the_request_is_not_sent(
        self, provider: Any, variable: str, engine: Any, http: Any
    ) -> None:
        with pytest.raises(ToolError, match=rf"^search failed: {variable} has characters"):
            await provider(http, SecretStr("a\r\nX-Other: b"), 5, engine.url).search("x", 5)
        assert engine.paths == []

    async def test_a_failure_is_its_status(self, provider: Any, variable: str, engine: Any, http: Any) -> None:
        engine.status = 503
        with pytest.raises(ToolError, match=r"^search failed: 503$"):
            await provider(http, KEY, 5, engine.url).search("x", 5)

    async def test_a_slow_service_is_left(self, provider: Any, variable: str, engine: Any, http: Any) -> None:
        engine.delay = 20
        with pytest.raises(ToolError, match=r"^search timeout after 0\.2s$"):
            await provider(http, KEY, 0.2, engine.url).search("x", 5)
