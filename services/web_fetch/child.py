"""The process in which pages are read."""

from __future__ import annotations

from typing import Any

from services.web_fetch.extract import extract
from shared.reading.charset import load_detector, to_text
from shared.reading.child import serve
from shared.reading.parts import part

# What the process itself holds is 30 MB of it.
MEMORY = 105 * 1024 * 1024
# The plain reading is the last attempt. It takes up to a second on a fast machine, and must not fail on a slow one.
CPU_SECONDS, PLAIN_CPU_SECONDS = 1.25, 4.0


def read(data: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """Return the requested part of the page's text, and the links of the whole text."""
    text = to_text(data, request["declared"], request["cut"])
    content = extract(
        text, request["content_type"], plain=request["plain"], url=request["url"], offset=request["offset"]
    )
    whole = content.headed
    offset = min(request["offset"], len(whole))
    shown, after = part(whole, offset, request["max_chars"])
    return {
        "title": content.title,
        "text": shown,
        "chars": len(whole),
        "after": after,
        "cut": request["cut"] or content.cut,
        "links": [{"text": link.text, "url": link.url} for link in content.links],
        "refresh": content.refresh,
        "has_text": bool(content.text),
    }


def _cpu_seconds(request: dict[str, Any]) -> float:
    return PLAIN_CPU_SECONDS if request["plain"] else CPU_SECONDS


def _load(request: dict[str, Any]) -> None:
    """Import the detector and the parsers, before the time of the page is measured."""
    load_detector()
    if not request["plain"]:
        import lxml.html  # noqa: F401
        import trafilatura  # noqa: F401


if __name__ == "__main__":
    serve(read, memory=MEMORY, cpu_seconds=_cpu_seconds, prepare=_load)
