"""What the web is for the tests: pages that take a fixed time to come, and a search engine that finds them.

Runs in a container of its own; `GET /stats` says who fetched how many pages, `DELETE /stats` begins to count anew.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

DELAY = float(os.environ.get("DELAY", "0.3"))
HERE = "http://world:8000"
KEEPERS = "Lighthouse Keepers of the Northern Coast"
TEXT = """For more than two centuries the keepers of the northern lighthouses climbed their towers every evening,
trimmed the wicks and polished the lenses, so that fishing vessels could find the harbour entrance through fog.
Automation ended the profession gradually: electric lamps replaced petroleum burners, remote monitoring replaced the
nightly inspection, and the final resident keeper left the island station together with his family in early spring."""

# What is found, by a word of the query; the last entry is found for everything else.
HITS = {
    "bitcoin": (
        "Bitcoin price today",
        "Bitcoin trades at $64,210 this morning, above yesterday.",
        "/page/btc",
    ),
    "news": (
        "Small open models catch up",
        "Researchers published compact language models that call tools reliably on ordinary laptops.",
        "/page/news",
    ),
    "": (KEEPERS, "A page about the people who tended the northern lighthouses.", "/keepers"),
}

fetched: Counter[str] = Counter()


def html(heading: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><title>{heading}</title></head><body><nav><a href="/">Home</a></nav>'
        f"<main><article><h1>{heading}</h1><p>{TEXT}</p></article></main><footer>Imprint</footer></body></html>"
    )


async def page(request: Request) -> Response:
    assert request.client is not None
    fetched[request.client.host] += 1
    await asyncio.sleep(DELAY)
    name = request.path_params.get("name")
    return HTMLResponse(html(KEEPERS if name is None else f"Page {name}"))


async def search(request: Request) -> Response:
    query = request.query_params.get("q", "").lower()
    found = [hit for word, hit in HITS.items() if word and word in query] or [HITS[""]]
    results = [{"title": title, "content": content, "url": HERE + path} for title, content, path in found]
    return JSONResponse({"query": query, "results": results, "unresponsive_engines": []})


async def stats(request: Request) -> Response:
    if request.method == "DELETE":
        fetched.clear()
    return JSONResponse(fetched)


async def healthz(_request: Request) -> Response:
    return PlainTextResponse("ok")


app = Starlette(
    routes=[
        Route("/keepers", page),
        Route("/page/{name}", page),
        Route("/search", search),
        Route("/stats", stats, methods=["GET", "DELETE"]),
        Route("/healthz", healthz),
    ]
)

if __name__ == "__main__":
    uvicorn.run(app, host="0.0.0.0", port=8000, log_level="warning")
