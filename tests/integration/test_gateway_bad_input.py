"""Whatever a client sends: a 4xx with a code and a sentence, never a 500, never a stream that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http_gateway import Site, gateway_settings, generating, serving

from services.gateway.http.body import MAX_BODY


@pytest.fixture
async def site(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(gateway_settings(redis_url, tmp_path, max_session_backlog=10_000, max_backlog=10_000)) as site:
        yield site


def error(response: Any) -> tuple[int, str]:
    """Status and code, after a look at the shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert len(message) < 600
    return response.status_code, body["error"]["code"]


BODIES: list[tuple[Any, str]] = [
    ({}, "query"),
    ({"query": ""}, "query"),
    ({"query": "  \n"}, "query"),
    ({"query": "x" * 400_001}, "query"),
    ({"query": 7}, "query"),
    ({"query": None}, "query"),
    ({"query": "x", "mode": "duel"}, "mode"),
    ({"query": "x", "unknown": 1}, "unknown"),
    ({"query": "x", "session_id": ""}, "session_id"),
    ({"query": "x", "session_id": "a{b}"}, "session_id"),
    ({"query": "x", "session_id": "a b"}, "session_id"),
    ({"query": "x", "session_id": "x" * 129}, "session_id"),
    ({"query": "x", "session_id": "\x00"}, "session_id"),
    ({"query": "x", "session_id": 5}, "session_id"),
    ({"query": "x", "rounds": 1}, "rounds"),
    ({"query": "x", "mode": "committee", "rounds": 0}, "rounds"),
    ({"query": "x", "mode": "committee", "rounds": 10**30}, "rounds"),
    ({"query": "x", "options": {"temperature": 9}}, "temperature"),
    ({"query": "x", "options": {"num_ctx": 1}}, "num_ctx"),
    ({"query": "x", "options": {"seed": 10**19}}, "seed"),
    ({"query": "x", "tools": "web_search"}, "tools"),
    ({"query": "x", "messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"query": "x", "messages": [], "session_id": "s"}, "session_id"),
    ({"query": "x", "deadline_seconds": -1}, "deadline_seconds"),
    ([], "body"),
    ("x", "body"),
    (None, "body"),
]


async def test_a_wrong_value_is_422_and_the_sentence_names_the_field(site: Site) -> None:
    for body, field in BODIES:
        response = await site.http.post("/query", json=body)
        assert error(response) == (422, "invalid_request"), body
        assert field in response.json()["error"]["message"], (body, response.text)


async def test_a_body_that_is_not_json_is_400(site: Site) -> None:
    head = {"Content-Type": "application/json"}
    for raw in (
        b"{",
        b"\xff\xfe",
        b'{"query": "\\ud800"}',
        b'{"query": NaN}',
        b"[" * 5_000,
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b'{"query": ' + b"9" * 5_000 + b"x}",
    ):
        response = await site.http.post("/query", content=raw, headers=head)
        assert error(response)[0] == 400, raw[:40]
    nested: Any = 1
    for _ in range(70):
        nested = [nested]
    response = await site.http.post("/tools/x/call", json={"args": {"deep": nested}})
    assert error(response) == (400, "bad_json")


async def test_another_content_type_is_415(site: Site) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "jsonish"):
        response = await site.http.post("/query", content=b'{"query":"x"}', headers={"Content-Type": kind})
        assert error(response) == (415, "unsupported_media_type"), kind


async def test_a_body_over_four_megabytes_is_413_while_it_is_read(site: Site) -> None:
    sent = 0

    async def long(most: int) -> AsyncIterator[bytes]:
        nonlocal sent
        sent = 0
        while sent < most:
            sent += 65_536
            yield b" " * 65_536

    head = {"Content-Type": "application/json"}
    exact = await site.http.post("/query", content=b'{"query": ""}'.ljust(MAX_BODY), headers=head)
    assert error(exact) == (422, "invalid_request")
    declared = await site.http.post("/query", content=b'{"query": ""}'.ljust(MAX_BODY + 1), headers=head)
    assert error(declared) == (413, "body_too_large")
    assert error(await site.http.post("/query", content=long(6_000_000), headers=head)) == (413, "body_too_large")
    # a client that never stops is cut off, with the answer or without it
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        assert error(await site.http.post("/query", content=long(100_000_000), headers=head))[0] == 413
    assert sent < 40_000_000


async def test_unknown_routes_and_methods_have_the_same_shape(site: Site) -> None:
    assert error(await site.http.get("/nowhere")) == (404, "not_found")
    assert error(await site.http.get("/query")) == (405, "method_not_allowed")
    assert error(await site.http.put("/sessions")) == (405, "method_not_allowed")
    for path in ("/memory/topics/user.x", "/keys"):
        allowed = (await site.http.options(path)).headers["allow"].split(", ")
        assert "GET" in allowed
        assert len(allowed) > 1
    unknown = await site.http.get("/v1/nowhere")
    assert error(unknown) == (404, "not_found")
    assert unknown.json()["error"]["type"] == "not_found_error"
    assert unknown.json()["error"]["message"] == "there is no such route: GET /v1/nowhere"


async def test_a_question_may_have_400_000_characters(site: Site) -> None:
    asked = await site.http.post("/query?wait=false", json={"query": "é" * 400_000})
    assert asked.status_code == 202, asked.text
    refused = await site.http.post("/query?wait=false", json={"query": "é" * 400_001})
    assert error(refused) == (422, "invalid_request")
    assert "400000 characters" in refused.json()["error"]["message"]


async def test_ids_that_cannot_be_are_not_found(site: Site) -> None:
    for text in ("1", "x", "1-0-0", "-", "9" * 40 + "-0", "\x00", "１-０", "*", "%", "é", "a{b}", "..;", "1-0\n"):
        part = quote(text, safe="")
        for method, path in [
            ("GET", f"/queries/{part}"), ("GET", f"/queries/{part}/events"), ("POST", f"/queries/{part}/cancel"),
            ("GET", f"/sessions/{part}"), ("DELETE", f"/sessions/{part}"), ("DELETE", f"/keys/{part}"),
            ("GET", f"/participants/{part}/settings"),
        ]:  # fmt: skip
            response = await site.http.request(method, path)
            assert error(response)[0] == 404, (method, path)
        response = await site.http.post("/feedback", json={"query_id": text, "stars": 5})
        assert error(response)[0] == 404, text


async def test_an_event_id_that_cannot_be_is_400_and_the_stream_does_not_hang(
    redis_url: str, tmp_path: Path, site: Site
) -> None:
    async with generating(redis_url, tmp_path):
        query_id = (await site.http.post("/query", json={"query": "say x"})).json()["query_id"]
    path = f"/queries/{query_id}/events"
    for text in (
        "x",
        "1",
        "-1-0",
        "1-0; DROP",
        "9" * 19 + "-0",
        "1-" + "9" * 19,
        "$",
        "+",
        "0-0-0",
        "99999999999999-0",
    ):
        for response in (
            await site.http.get(path, headers={"Last-Event-ID": text}),
            await site.http.get(path, params={"last_event_id": text}),
        ):
            assert error(response) == (400, "bad_event_id"), text


async def test_limits_out_of_range_are_422(site: Site) -> None:
    for path in (
        "/sessions?limit=-1",
        "/sessions?limit=0",
        "/sessions?offset=-1",
        "/sessions?limit=x",
        "/sessions?limit=" + "9" * 50,
        "/dead-letters?limit=-5",
        "/bus/events?last=-1",
        "/bus/events?subject=nonsense",
        "/queries/1-0?respondent=C",
        "/files?limit=0",
        "/files?limit=501",
        "/files?cursor=-1",
        f"/files?cursor={2**62}",
        "/documents",
        "/documents?query=",
        f"/documents?query={'y' * 4_001}",
        "/documents?query=x&limit=0",
        "/documents?query=x&limit=51",
    ):
        assert error(await site.http.get(path)) == (422, "invalid_request"), path
    assert error(await site.http.post(f"/files?name={'x' * 1_001}")) == (422, "invalid_request")
    assert error(await site.http.get("/dead-letters?cursor=x")) == (400, "bad_event_id")
    for path in ("/dead-letters/x/replay", "/dead-letters/0/replay"):
        assert error(await site.http.post(path)) == (400, "bad_event_id")


FEEDBACK: list[tuple[dict[str, Any], str]] = [
    ({}, "sentiment or stars"),
    ({"rating": 5}, "rating: there is no such field"),
    ({"stars": 5, "rating": 5}, "rating: there is no such field"),
    ({"stars": 0}, "stars"),
    ({"stars": 6}, "stars"),
    ({"stars": 5, "sentiment": "negative"}, "contradict"),
    ({"sentiment": "meh"}, "sentiment"),
    ({"stars": 5, "comment": "x" * 4_001}, "comment"),
]


async def test_feedback_that_says_nothing_is_422(site: Site) -> None:
    for body, part in FEEDBACK:
        response = await site.http.post("/feedback", json={"query_id": "1-0", **body})
        assert error(response) == (422, "invalid_request"), body
        assert part in response.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["query", "session_id", "mode", "messages", "options", "tools", "model", "personas", "rounds", "stars", "args",
     "sentiment", "query_id", "name", "user_id", "role", "stream", "stop", "deadline_seconds", "log_level",
     "max_backlog"]
)  # fmt: skip


async def test_no_body_makes_the_gateway_fail(site: Site) -> None:
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body=JSON | st.dictionaries(FIELDS, JSON, max_size=4))
    def bodies(body: Any) -> None:
        raw = json.dumps(body)

        async def send() -> None:
            head = {"Content-Type": "application/json"}
            for method, path in (("POST", "/query?wait=false"), ("POST", "/v1/chat/completions"), ("POST", "/feedback"),
                                 ("POST", "/tools/none/call"), ("POST", "/keys"),
                                 ("PATCH", "/participants/gateway/settings")):  # fmt: skip
                response = await site.http.request(method, path, content=raw, headers=head)
                if response.status_code >= 400:
                    assert error(response)[0] < 500, (path, raw)

        asyncio.run_coroutine_threadsafe(send(), loop).result(20)

    await asyncio.to_thread(bodies)


async def test_no_path_or_parameter_makes_the_gateway_fail(site: Site) -> None:
    loop = asyncio.get_running_loop()

    @settings(max_examples=150, deadline=None)
    @given(text=st.text(min_size=1, max_size=40), number=st.integers())
    def paths(text: str, number: int) -> None:
        part = quote(text, safe="")

        async def send() -> None:
            for path in (f"/queries/{part}", f"/queries/{part}/events?last_event_id={part}", f"/sessions/{part}",
                         f"/sessions?limit={number}&offset={number}", f"/participants/{part}/settings",
                         f"/dead-letters?cursor={part}&limit={number}"):  # fmt: skip
                response = await site.http.get(path)
                assert response.status_code < 500, (path, response.text)

        asyncio.run_coroutine_threadsafe(send(), loop).result(20)

    await asyncio.to_thread(paths)
