"""SearXNG over real HTTP: its answers, its silences and its query syntax."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import tracemalloc
import zlib
from typing import Any

import pytest

from services.web_search.hits import Hit
from services.web_search.http import MAX_ANSWER
from services.web_search.searxng import SearxNG, without_commands
from shared.errors import ToolError


def page(n: int) -> dict[str, Any]:
    return {"title": f"Page {n}", "content": f"About <b>{n}</b>", "url": f"https://{n}.example/", "engine": "x"}


async def test_results_are_asked_for_as_json_and_limited(engine: Any, http: Any) -> None:
    engine.answer = {"results": [page(n) for n in range(9)]}
    hits = await SearxNG(http, engine.url + "/", 5).search("tides of Norhaven & more", 3)
    assert hits == [Hit(f"Page {n}", f"About {n}", f"https://{n}.example/") for n in range(3)]
    assert engine.paths == ["/search"]
    assert engine.query == {"q": "tides of Norhaven & more", "format": "json"}


async def test_nothing_found_is_an_empty_list(engine: Any, http: Any) -> None:
    assert await SearxNG(http, engine.url, 5).search("x", 5) == []


async def test_engines_that_did_not_answer_are_an_error_not_nothing_found(engine: Any, http: Any) -> None:
    engine.answer = {"results": [], "unresponsive_engines": [["google", "CAPTCHA"], ["bing", "timeout"], "duck"]}
    with pytest.raises(ToolError) as caught:
        await SearxNG(http, engine.url, 5).search("x", 5)
    assert str(caught.value) == (
        "search failed: nothing was found, but these engines did not answer: google (CAPTCHA), bing (timeout), duck"
    )


async def test_of_very_many_silent_engines_a_few_are_named(engine: Any, http: Any) -> None:
    engine.answer = {"unresponsive_engines": [f"engine {n}" for n in range(50_000)]}
    with pytest.raises(ToolError) as caught:
        await SearxNG(http, engine.url, 5).search("x", 5)
    assert str(caught.value).endswith("engine 8, engine 9, 49990 more")


async def test_a_silent_engine_does_not_matter_when_others_found_something(engine: Any, http: Any) -> None:
    engine.answer = {"results": [page(1)], "unresponsive_engines": [["google", "CAPTCHA"]]}
    assert len(await SearxNG(http, engine.url, 5).search("x", 5)) == 1


@pytest.mark.parametrize(
    ("answer", "hit"),
    [
        ({"answers": ["42"]}, Hit("Answer", "42", "(none)")),
        (
            {"answers": [{"answer": "<p>42</p>", "url": "https://a.example/"}]},
            Hit("Answer", "42", "https://a.example/"),
        ),
        (
            {
                "infoboxes": [
                    {"infobox": "Lenn", "content": "A river", "urls": [{"title": "w", "url": "https://w.example/"}]}
                ]
            },
            Hit("Lenn", "A river", "https://w.example/"),
        ),
        (
            {"infoboxes": [{"infobox": "Lenn", "content": "A river", "id": "https://id.example/"}]},
            Hit("Lenn", "A river", "https://id.example/"),
        ),
    ],
)
async def test_direct_results_count_as_hits(answer: dict[str, Any], hit: Hit, engine: Any, http: Any) -> None:
    engine.answer = {"results": [], "unresponsive_engines": [["google", "CAPTCHA"]], **answer}
    assert await SearxNG(http, engine.url, 5).search("x", 5) == [hit]


async def test_direct_answers_come_first(engine: Any, http: Any) -> None:
    engine.answer = {"results": [page(1), page(2)], "answers": ["42"]}
    assert [hit.title for hit in await SearxNG(http, engine.url, 5).search("x", 2)] == ["Answer", "Page 1"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (
            403,
            "search failed: 403 (SearXNG's JSON format is disabled: add `json` to `search.formats` in its "
            "settings.yml)",
        ),
        (429, "search failed: 429 (SearXNG limits the rate: switch `server.limiter` off for this network)"),
        (503, "search failed: 503"),
        (500, "search failed: 500"),
        (
            302,
            "search failed: 302 (it redirects elsewhere, which is not followed: set the address that answers itself)",
        ),
    ],
)
async def test_a_status_is_an_error_with_advice_and_never_followed(
    status: int, error: str, engine: Any, http: Any
) -> None:
    engine.status = status
    engine.headers = {"Location": f"{engine.url}/elsewhere"}
    with pytest.raises(ToolError) as caught:
        await SearxNG(http, engine.url, 5).search("x", 5)
    assert str(caught.value) == error
    assert engine.paths == ["/search"]


@pytest.mark.parametrize("answer", [b"<html>", b"", b"[]", b'"text"', b"\xff\xfe", b"[" * 200_000])
async def test_an_answer_that_is_not_a_json_object_is_an_error(answer: bytes, engine: Any, http: Any) -> None:
    engine.answer = answer
    with pytest.raises(ToolError, match=r"^search failed: the answer is not"):
        await SearxNG(http, engine.url, 5).search("x", 5)


@pytest.mark.parametrize(
    "answer",
    [
        {"results": None},
        {"results": "x"},
        {"results": [1, None, {}]},
        {"answers": [1, {}]},
        {"infoboxes": [{}]},
        {},
        {"answers": 1},
        {"unresponsive_engines": "all"},
    ],
)
async def test_parts_of_an_unexpected_form_are_left_out(answer: dict[str, Any], engine: Any, http: Any) -> None:
    engine.answer = answer
    assert await SearxNG(http, engine.url, 5).search("x", 5) == []


async def test_the_whole_search_is_timed(engine: Any, http: Any) -> None:
    engine.delay = 20
    started = time.monotonic()
    with pytest.raises(ToolError) as caught:
        await SearxNG(http, engine.url, 0.3).search("x", 5)
    assert str(caught.value) == "search timeout after 0.3s"
    assert time.monotonic() - started < 1.5


async def test_an_answer_is_read_no_further_than_its_limit(engine: Any, http: Any) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"results": [')
        with contextlib.suppress(ConnectionError):
            while sent < 400_000_000:
                writer.write(b'{"title": "x"}, ' * 4_000)
                sent += 64_000
                await writer.drain()

    engine.answer = endless
    with pytest.raises(ToolError, match=r"^search failed: the answer is larger than 2 MB$"):
        await SearxNG(http, engine.url, 30).search("x", 5)
    # what the kernel's buffers hold comes on top
    assert sent < 20_000_000


async def test_a_compressed_answer_is_unpacked_no_further_than_its_limit(engine: Any, http: Any) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(200)) + packer.flush()
    engine.answer, engine.headers = bomb, {"Content-Encoding": "gzip"}
    tracemalloc.start()
    try:
        with pytest.raises(ToolError, match=r"^search failed: the answer is larger than 2 MB$"):
            await SearxNG(http, engine.url, 30).search("x", 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MAX_ANSWER


async def test_a_compressed_answer_is_read(engine: Any, http: Any) -> None:
    engine.answer = gzip.compress(json.dumps({"results": [page(1)]}).encode())
    engine.headers = {"Content-Encoding": "gzip"}
    assert len(await SearxNG(http, engine.url, 5).search("x", 5)) == 1


@pytest.mark.parametrize("coding", ["", "gzip"])
async def test_an_answer_that_is_cut_says_so(coding: str, engine: Any, http: Any) -> None:
    async def cut(writer: asyncio.StreamWriter) -> None:
        data = gzip.compress(b'{"results": []}' * 100)[:20] if coding else b'{"results": ['
        length = len(data) if coding else 1_000
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nContent-Encoding: {coding or 'identity'}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()

    engine.answer = cut
    with pytest.raises(ToolError, match=rf"^search failed: the answer of {engine.url}/ broke off$"):
        await SearxNG(http, engine.url, 5).search("x", 5)


async def test_no_service_is_an_error_that_says_where_it_was_looked_for(http: Any) -> None:
    with pytest.raises(ToolError) as caught:
        await SearxNG(http, "http://user:secret@127.0.0.1:9/base", 5).search("x", 5)
    assert str(caught.value) == "search failed: no connection to http://127.0.0.1:9/"


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        ("!!g bitcoin", "g bitcoin"),
        ("!images cats", "images cats"),
        (":de Wetter", "de Wetter"),
        ("<3 fast", "3 fast"),
        ("news !!w this week", "news w this week"),
        ("news :fr <1 today !", "news fr 1 today"),
        ("!! ! : <", ""),
        ("!:<!! deep", "deep"),
        ("C++ a!=b 10:30 x<y wow!", "C++ a!=b 10:30 x<y wow!"),
    ],
)
def test_no_word_of_a_query_is_a_command(query: str, sent: str) -> None:
    assert without_commands(query) == sent


async def test_a_query_of_commands_only_is_not_sent(engine: Any, http: Any) -> None:
    with pytest.raises(ToolError, match=r"^search failed: the query has no words, only signs of"):
        await SearxNG(http, engine.url, 5).search("!!!", 5)
    assert engine.paths == []
