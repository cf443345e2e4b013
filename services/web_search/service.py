"""web_search: finds pages for a query."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import ClassVar, Literal, assert_never

import httpx
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr

from services.web_search.hits import SearchProvider, render
from services.web_search.hosted import Brave, Tavily
from services.web_search.mock import Mock
from services.web_search.searxng import SearxNG
from shared.contracts import ToolRequest
from shared.envelope import now_ms
from shared.participant.service import Context, Service, Work
from shared.participant.settings import Settings
from shared.participant.tool import RunFor, Tool, ToolResult, open_tools
from shared.zones import first_zone, local_date

WEB_URL = r"^https?://[^\s/]+"


class WebSearch(BaseModel):
    """Search the web for current facts, news, prices or anything that may have changed recently or that you do not
    know. Call it for questions such as "what happened this week", "what is the current price of ..." or "find pages
    about ...". It returns titles, snippets and URLs; often the snippets are enough to answer."""

    model_config = ConfigDict(str_strip_whitespace=True)

    query: str = Field(min_length=1, description="Concise search query (English preferred)")


class WebSearchSettings(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {
        "provider",
        "searxng_url",
        "max_results",
        "timeout",
        "mock_page_url",
    }

    provider: Literal["searxng", "brave", "tavily", "mock"] = Field(
        default="searxng", description="Search service; mock answers with canned hits, without HTTP"
    )
    searxng_url: str = Field(
        default="http://localhost:8080",
        pattern=WEB_URL,
        validation_alias=AliasChoices("searxng_url", "SEARXNG_URL"),
        description="Address of SearXNG",
    )
    max_results: int = Field(default=5, ge=1, le=20, description="Hits given to the model")
    timeout: float = Field(default=10.0, gt=0, le=120, description="Seconds that one search may take")
    mock_page_url: str = Field(
        default="https://local2.example.com/gemma-tool-calling",
        pattern=WEB_URL,
        description="URL of the mock provider's top hit about LoCAL2",
    )
    brave_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("brave_api_key", "BRAVE_API_KEY"),
        description="API key of Brave Search",
    )
    tavily_api_key: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("tavily_api_key", "TAVILY_API_KEY"),
        description="API key of Tavily",
    )


def provider_for(settings: WebSearchSettings, http: httpx.AsyncClient) -> SearchProvider:
    """The provider that the settings name."""
    match settings.provider:
        case "searxng":
            return SearxNG(http, settings.searxng_url, settings.timeout)
        case "brave":
            return Brave(http, settings.brave_api_key, settings.timeout)
        case "tavily":
            return Tavily(http, settings.tavily_api_key, settings.timeout)
        case "mock":
            return Mock(settings.mock_page_url)
        case _:
            assert_never(settings.provider)


async def search(
    provider: SearchProvider, settings: WebSearchSettings, now: Callable[[], int], args: WebSearch, request: ToolRequest
) -> ToolResult:
    """Return titles, snippets and URLs for the query, below the user's date. now: returns ms since the epoch. Raises
    ToolError."""
    hits = await provider.search(args.query, settings.max_results)
    return render(args.query, hits, local_date(now(), first_zone(request.time_zone, settings.zone)))


@asynccontextmanager
async def build(settings: WebSearchSettings) -> AsyncIterator[RunFor[WebSearch]]:
    # SearXNG is the operator's own, mostly on this machine: a proxy of the environment would only be in the way.
    http = httpx.AsyncClient(timeout=settings.timeout, trust_env=settings.provider != "searxng")
    async with http:
        yield partial(search, provider_for(settings, http), settings, now_ms)


@asynccontextmanager
async def _tools(settings: WebSearchSettings) -> AsyncIterator[Sequence[Tool[WebSearch]]]:
    async with build(settings) as run:
        yield [Tool("web_search", WebSearch, run, timeout=settings.timeout)]


def _opened(context: Context[WebSearchSettings]) -> AbstractAsyncContextManager[Sequence[Work]]:
    return open_tools(context, _tools)


app = Service("web_search", WebSearchSettings, _opened)
