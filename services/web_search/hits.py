"""What a search finds, its cleaning, and the text that the model reads."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Protocol
from urllib.parse import urlsplit

from shared.participant.tool import ToolResult

MAX_TITLE = 200
# Tavily's snippets are page content: without a limit five hits would fill the model's context.
MAX_SNIPPET = 600
NO_URL = "(none)"

_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")


@dataclass(frozen=True, slots=True)
class Hit:
    title: str
    snippet: str
    url: str


class SearchProvider(Protocol):
    async def search(self, query: str, max_results: int) -> list[Hit]:
        """At most `max_results` cleaned hits, best first; an empty list means that nothing was found.

        Raises ToolError, also when the search itself did not work.
        """
        ...


def clean(text: object, limit: int) -> str:
    """One line of plain text: no HTML, no control or invisible formatting characters, at most `limit` characters."""
    if not isinstance(text, str):
        return ""
    plain = html.unescape(_TAG.sub(" ", text))
    line = " ".join("".join(_visible(c) for c in plain).split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _visible(character: str) -> str:
    match unicodedata.category(character):
        case "Cc" | "Zs" | "Zl" | "Zp":
            return " "
        # Bidirectional overrides, zero-width characters, soft hyphens; lone surrogates cannot be sent.
        case "Cf" | "Cs":
            return ""
        case _:
            return character


def web_url(value: object) -> str:
    """The value when it is an http(s) URL with a host, on one line, else an empty string."""
    if not isinstance(value, str):
        return ""
    url = value.strip()
    if not url.lower().startswith(("http://", "https://")) or any(c.isspace() or c < " " for c in url):
        return ""
    try:
        return url if urlsplit(url).hostname else ""
    except ValueError:
        return ""


def collect(raw: Iterable[tuple[object, object, object]], max_results: int) -> list[Hit]:
    """Cleaned hits of (title, snippet, url) as a provider gave them: each page once, nothing without a web address."""
    hits: dict[str, Hit] = {}
    for title, snippet, address in raw:
        url = web_url(address)
        if url and url not in hits:
            hits[url] = Hit(clean(title, MAX_TITLE) or url, clean(snippet, MAX_SNIPPET), url)
        if len(hits) == max_results:
            break
    return list(hits.values())


def render(query: str, hits: Sequence[Hit], today: date) -> ToolResult:
    """The tool's result for these hits."""
    if not hits:
        return ToolResult(f"No results found for: {query}", [])
    blocks = [f"Today's date: {today.isoformat()}"]
    blocks += [
        f"[{n}] Title: {hit.title}\n    Snippet: {hit.snippet}\n    URL: {hit.url}" for n, hit in enumerate(hits, 1)
    ]
    return ToolResult("\n\n".join(blocks), [asdict(hit) for hit in hits])
