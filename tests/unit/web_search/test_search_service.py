"""The worker as the runtime builds it: settings, providers, the stories' canned hits."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from services.web_search.hits import Hit
from services.web_search.service import WebSearch, WebSearchSettings, app, build, search
from shared.contracts import ToolRequest
from shared.errors import SettingsError, ToolError

NAMES = ("SEARXNG_URL", "BRAVE_API_KEY", "TAVILY_API_KEY")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_the_defaults_are_the_agreed_ones() -> None:
    settings = WebSearchSettings.load("web_search")
    assert settings.provider == "searxng"
    assert settings.searxng_url == "http://localhost:8080"
    assert settings.max_results == 5
    assert settings.timeout == 10
    assert app.participant == "web_search"


def test_the_agreed_names_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("http://searx.example", "brave-key", "tavily-key"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL2_WEB_SEARCH_PROVIDER", "brave")
    settings = WebSearchSettings.load("web_search")
    assert settings.searxng_url == "http://searx.example"
    assert settings.provider == "brave"
    assert settings.brave_api_key is not None
    assert settings.brave_api_key.get_secret_value() == "brave-key"
    assert settings.tavily_api_key is not None
    assert settings.tavily_api_key.get_secret_value() == "tavily-key"


def test_keys_are_no_run_time_settings_and_never_shown() -> None:
    settings = WebSearchSettings(brave_api_key="brave-key", tavily_api_key="tavily-key")
    shown = f"{settings!r} {settings.runtime_values()} {WebSearchSettings.get_settings_schema()}"
    assert "brave-key" not in shown
    assert "tavily-key" not in shown
    assert "api_key" not in str(settings.runtime_values())
    with pytest.raises(SettingsError):
        settings.update_settings({"brave_api_key": "other"})
    assert settings.update_settings({"provider": "brave"}).brave_api_key == settings.brave_api_key


@pytest.mark.parametrize(
    "values",
    [{"provider": "google"}, {"max_results": 0}, {"max_results": 21}, {"timeout": 0}, {"searxng_url": "ftp://x"}],
)
def test_a_wrong_run_time_setting_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        WebSearchSettings().update_settings(values)


@pytest.mark.parametrize("args", [{}, {"query": ""}, {"query": " \n "}])
def test_a_query_is_required(args: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        WebSearch(**args)


def test_the_model_sees_what_the_argument_is() -> None:
    schema = WebSearch.model_json_schema()
    assert schema["required"] == ["query"]
    assert schema["properties"]["query"]["description"] == "Concise search query (English preferred)"


def request(time_zone: str = "") -> ToolRequest:
    return ToolRequest(query_id="q", call_id="c", tool="web_search", args={}, time_zone=time_zone)


@pytest.mark.parametrize(
    ("asked", "deployment", "day"),
    [
        ("Australia/Sydney", "America/Los_Angeles", "2031-02-04"),
        ("America/Los_Angeles", "Australia/Sydney", "2031-02-03"),
        ("", "Australia/Sydney", "2031-02-04"),
        ("Mars/Olympus", "Australia/Sydney", "2031-02-04"),
    ],
    ids=["sydney", "los-angeles", "deployment", "unknown-to-this-worker"],
)
async def test_search_result_has_the_date_of_the_users_zone(asked: str, deployment: str, day: str) -> None:
    class One:
        async def search(self, query: str, max_results: int) -> list[Hit]:
            return [Hit("t", "s", "https://a.example/")][:max_results]

    evening = round(datetime(2031, 2, 3, 20, tzinfo=UTC).timestamp() * 1000)
    settings = WebSearchSettings(time_zone=deployment)
    result = await search(One(), settings, lambda: evening, WebSearch(query="x"), request(asked))
    assert result.text.startswith(f"Today's date: {day}\n\n[1] Title: t\n")


async def test_searxng_is_asked_through_the_built_worker(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    engine.answer = {"results": [{"title": "T", "content": "S", "url": "https://a.example/"}]}
    async with build(WebSearchSettings(searxng_url=engine.url)) as run:
        result = await run(WebSearch(query=" tides "), request())
    assert result.text.endswith("\n\n[1] Title: T\n    Snippet: S\n    URL: https://a.example/")
    assert engine.query["q"] == "tides"


async def test_nothing_found_is_no_error(engine: Any) -> None:
    async with build(WebSearchSettings(searxng_url=engine.url)) as run:
        assert (await run(WebSearch(query="tides"), request())).text == "No results found for: tides"


@pytest.mark.parametrize("provider", ["brave", "tavily"])
async def test_a_provider_without_its_key_answers_with_a_clear_error(provider: Any) -> None:
    async with build(WebSearchSettings(provider=provider)) as run:
        with pytest.raises(ToolError, match=rf"set {provider.upper()}_API_KEY in the environment"):
            await run(WebSearch(query="x"), request())


async def canned(query: str, **settings: Any) -> Any:
    async with build(WebSearchSettings(provider="mock", **settings)) as run:
        return await run(WebSearch(query=query), request())


async def test_the_mock_knows_the_price_of_bitcoin() -> None:
    result = await canned("current price of Bitcoin in USD")
    assert re.search(r"\$\d[\d,.]+", result.text)
    assert "Bitcoin" in result.data[0]["title"]


async def test_the_mock_knows_news_about_ai() -> None:
    assert "AI" in (await canned("major AI news this week")).data[0]["title"]


async def test_the_mocks_top_hit_about_local2_is_the_page_that_the_settings_name() -> None:
    result = await canned("LoCAL2 Gemma tool calling", mock_page_url="http://127.0.0.1:8099/page")
    assert result.data[0]["url"] == "http://127.0.0.1:8099/page"
    assert "    URL: http://127.0.0.1:8099/page\n" in result.text


@pytest.mark.parametrize("query", ["what is a {page_url}", "rain in Spain", "{query}", "!!g"])
async def test_the_mock_always_finds_the_same(query: str) -> None:
    first, again = await canned(query, max_results=1), await canned(query, max_results=1)
    assert first == again
    assert len(first.data) == 1
