"""Search services with an API key: Brave and Tavily."""

from __future__ import annotations

import httpx
from pydantic import SecretStr

from services.web_search.hits import Hit, collect
from services.web_search.http import fetch_json, objects
from shared.errors import ToolError

BRAVE = "https://api.search.brave.com"
TAVILY = "https://api.tavily.com"
# Brave refuses longer queries with 422.
BRAVE_CHARS, BRAVE_WORDS = 400, 50
BRAVE_PAGE = 20
TAVILY_PAGE = 20


class Brave:
    def __init__(self, http: httpx.AsyncClient, key: SecretStr | None, timeout: float, url: str = BRAVE) -> None:
        self._http, self._key, self._timeout, self._url = http, key, timeout, url

    async def search(self, query: str, max_results: int) -> list[Hit]:
        request = self._http.build_request(
            "GET",
            f"{self._url}/res/v1/web/search",
            params={
                "q": " ".join(query.split()[:BRAVE_WORDS])[:BRAVE_CHARS],
                "count": min(max_results, BRAVE_PAGE),
            },
            headers={"Accept": "application/json", "X-Subscription-Token": _required(self._key, "brave")},
        )
        answer = await fetch_json(self._http, request, self._timeout, _advice("BRAVE_API_KEY"))
        web = answer.get("web")
        results = objects(web.get("results")) if isinstance(web, dict) else []
        return collect(((r.get("title"), r.get("description"), r.get("url")) for r in results), max_results)


class Tavily:
    def __init__(self, http: httpx.AsyncClient, key: SecretStr | None, timeout: float, url: str = TAVILY) -> None:
        self._http, self._key, self._timeout, self._url = http, key, timeout, url

    async def search(self, query: str, max_results: int) -> list[Hit]:
        request = self._http.build_request(
            "POST",
            f"{self._url}/search",
            json={"query": query, "max_results": min(max_results, TAVILY_PAGE), "search_depth": "basic"},
            headers={"Authorization": f"Bearer {_required(self._key, 'tavily')}"},
        )
        answer = await fetch_json(self._http, request, self._timeout, _advice("TAVILY_API_KEY"))
        results = objects(answer.get("results"))
        return collect(((r.get("title"), r.get("content"), r.get("url")) for r in results), max_results)


def _required(key: SecretStr | None, provider: str) -> str:
    value = key.get_secret_value().strip() if key else ""
    if not value:
        raise ToolError(
            f"search failed: provider {provider} needs an API key: set {provider.upper()}_API_KEY in the "
            "environment of web_search"
        )
    if not value.isascii() or not value.isprintable():
        raise ToolError(f"search failed: {provider.upper()}_API_KEY has characters that no key has")
    return value


def _advice(variable: str) -> dict[int, str]:
    refused = f"the key in {variable} was refused"
    return {401: refused, 403: refused, 429: "the plan's rate limit is reached; try later"}
