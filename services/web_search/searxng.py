"""SearXNG, the default: a metasearch engine that the operator runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from services.web_search.hits import MAX_SNIPPET, MAX_TITLE, NO_URL, Hit, clean, collect, web_url
from services.web_search.http import fetch_json, objects
from shared.errors import ToolError

ADVICE = {
    403: "SearXNG's JSON format is disabled: add `json` to `search.formats` in its settings.yml",
    429: "SearXNG limits the rate: switch `server.limiter` off for this network",
}
# So many silent engines are named; an answer may have a hundred thousand.
NAMED_ENGINES = 10


class SearxNG:
    def __init__(self, http: httpx.AsyncClient, url: str, timeout: float) -> None:
        self._http = http
        self._url = url.rstrip("/") + "/search"
        self._timeout = timeout

    async def search(self, query: str, max_results: int) -> list[Hit]:
        plain = without_commands(query)
        if not plain:
            raise ToolError("search failed: the query has no words, only signs of a search engine's own commands")
        request = self._http.build_request("GET", self._url, params={"q": plain, "format": "json"})
        answer = await fetch_json(self._http, request, self._timeout, ADVICE)
        hits = _direct_answers(answer)
        hits += collect(_pages(answer), max_results)
        silent = _silent_engines(answer)
        if not hits and silent:
            # A 200 with nothing in it also means "every engine is down", and SearXNG does not say who else was asked.
            raise ToolError(f"search failed: nothing was found, but these engines did not answer: {', '.join(silent)}")
        return hits[:max_results]


def without_commands(query: str) -> str:
    """The query without SearXNG's own syntax, which any word can carry, not the first one only.

    `!!g` is answered by a redirect to another site, `!images` and `:de` choose engines and language, `<3` a time-out.
    """
    return " ".join(word for part in query.split() if (word := part.lstrip("!:<")))


def _direct_answers(answer: dict[str, Any]) -> list[Hit]:
    hits = []
    for item in _list(answer.get("answers")):
        # A plain string up to 2024, an object since.
        fields = item if isinstance(item, dict) else {"answer": item}
        text = clean(fields.get("answer"), MAX_SNIPPET)
        if text:
            hits.append(Hit("Answer", text, web_url(fields.get("url")) or NO_URL))
    return hits


def _pages(answer: dict[str, Any]) -> Iterator[tuple[object, object, object]]:
    for result in objects(answer.get("results")):
        yield result.get("title"), result.get("content"), result.get("url")
    for box in objects(answer.get("infoboxes")):
        links = [link.get("url") for link in objects(box.get("urls"))]
        yield box.get("infobox"), box.get("content"), next((u for u in [*links, box.get("id")] if web_url(u)), "")


def _silent_engines(answer: dict[str, Any]) -> list[str]:
    names = []
    engines = _list(answer.get("unresponsive_engines"))
    for engine in engines[:NAMED_ENGINES]:
        name, *reason = engine if isinstance(engine, list) and engine else [engine]
        names.append(clean(f"{name} ({reason[0]})" if reason else str(name), MAX_TITLE))
    left = len(engines) - len(names)
    return [*names, *([f"{left} more"] if left else [])]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
