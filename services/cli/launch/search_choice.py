"""Which search service web_search asks."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli.launch.probes import answers
from services.cli.settings import SearchWish


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """provider: what web_search is told, None for its own settings. note: a sentence for the terminal."""

    provider: str | None
    note: str


async def choose_search(wish: SearchWish, asked: str | None) -> SearchChoice:
    """The one asked for, else the one configured, else SearXNG if it answers, else a service there is a key for."""
    if asked:
        return SearchChoice(asked, f"web search by {asked}")
    if wish.provider:
        return SearchChoice(None, f"web search by {wish.provider}")
    if await answers(wish.searxng_url):
        return SearchChoice("searxng", f"web search by SearXNG at {wish.searxng_url}")
    if wish.brave_api_key:
        return SearchChoice("brave", "web search by Brave (SearXNG does not answer, BRAVE_API_KEY is set)")
    if wish.tavily_api_key:
        return SearchChoice("tavily", "web search by Tavily (SearXNG does not answer, TAVILY_API_KEY is set)")
    return SearchChoice(
        None,
        f"no web search: SearXNG does not answer at {wish.searxng_url}; searches will say that they failed "
        "(start SearXNG, set BRAVE_API_KEY or TAVILY_API_KEY, or try --search mock)",
    )
