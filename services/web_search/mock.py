"""Canned hits without any HTTP, for demonstrations and tests: the same query always finds the same."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from services.web_search.hits import Hit, collect


class Mock:
    def __init__(self, page_url: str) -> None:
        self._page_url = page_url

    async def search(self, query: str, max_results: int) -> list[Hit]:
        def filled(text: str) -> str:
            return text.replace("{query}", query).replace("{page_url}", self._page_url)

        entry = next(entry for entry in _entries() if _matches(entry["words"], query))
        return collect(
            ((filled(h["title"]), filled(h["snippet"]), filled(h["url"])) for h in entry["hits"]), max_results
        )


@cache
def _entries() -> list[dict[str, Any]]:
    """Entries in order of precedence; the last one has no words and matches every query."""
    text = files("services.web_search").joinpath("canned.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def _matches(words: list[str], query: str) -> bool:
    return not words or any(re.search(rf"\b{re.escape(word)}\b", query, re.IGNORECASE) for word in words)
