"""Whatever a client sends to the running stack, and whoever it is: refused with a code, or done; settings included."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.http_stack import HttpStack, Rules, answer_in, blocks, http_stack, parsed, take

pytestmark = pytest.mark.slow

RULES: Rules = [
    {"when": {"user": "^long"}, "respond": {"text": [f"w{number} " for number in range(60)], "pace": 0.03}},
    {"when": {"user": "^slow"}, "respond": {"text": "You said: <<query>>", "delay": 0.25}},
    {"respond": {"text": "You said: <<query>>"}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    with http_stack(tmp_path_factory.mktemp("stack"), RULES) as running:
        yield running


@pytest.fixture(scope="module")
def web(stack: HttpStack) -> Iterator[httpx.Client]:
    with stack.web(timeout=10) as client:
        yield client


# ── strange input ────────────────────────────────────────────────────────────────────────────────────────────────

STRANGE = st.one_of(
    st.sampled_from(
        [
            *("0-0", "1-1", "-1-0", "1-", "-", "*", "$", "+", "(1-1", "18446744073709551615-18446744073709551615"),
            *("99999999999999999999-0", "1e3-0", "١-٢", "\x00", "a\x00b", "..", "%2e%2e", "a/b", "a{b}", " ", "A:B"),
            *("null", "💥", "é" * 40, "x" * 200, "-1", "0", str(2**31), str(2**63), str(-(2**70)), "1.5", "NaN"),
        ]
    ),
    st.text(min_size=1, max_size=40),
    st.integers().map(str),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["query", "session_id", "mode", "personas", "rounds", "messages", "model", "options", "tools", "deadline_seconds",
     "query_id", "stars", "sentiment", "comment", "args", "stream", "name", "user_id", "role", "temperature",
     "concurrency", "max_backlog", "log_level", "n", "stop", "max_tokens"]
)  # fmt: skip
BODY = JSON | st.dictionaries(FIELDS, JSON | st.just("x"), max_size=6)
ROUTES = st.sampled_from(
    [
        ("POST", "/query"),
        ("POST", "/query?wait={0}&follow={1}"),
        ("GET", "/queries/{0}"),
        ("GET", "/queries/{0}?respondent={1}"),
        ("GET", "/queries/{0}/events?last_event_id={1}"),
        ("POST", "/queries/{0}/cancel"),
        ("POST", "/feedback"),
        ("GET", "/sessions?limit={0}&offset={1}"),
        ("GET", "/sessions/{0}"),
        ("DELETE", "/sessions/{0}"),
        ("GET", "/tools"),
        ("POST", "/tools/{0}/call"),
        ("POST", "/tools/web_search/call"),
        ("GET", "/participants"),
        ("GET", "/participants/{0}/settings"),
        ("PATCH", "/participants/{0}/settings"),
        ("PATCH", "/participants/web_search/settings"),
        ("GET", "/bus/streams"),
        ("GET", "/bus/events?subject={0}.&last={1}"),
        ("GET", "/dead-letters?limit={0}&cursor={1}"),
        ("POST", "/dead-letters/{0}/replay"),
        ("DELETE", "/dead-letters/{0}"),
        ("POST", "/keys"),
        ("DELETE", "/keys/{0}"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/metrics"),
        ("GET", "/{0}/{1}"),
    ]
)


def refused_or_done(response: httpx.Response) -> None:
    """A success, or a refusal in the one shape of errors."""
    if response.status_code >= 400:
        error = response.json()["error"]
        # a deadline may be as short as the client likes
        assert response.status_code < 500 or error["code"] == "deadline_exceeded", response.text
        assert error["code"]
        assert error["message"]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(route=ROUTES, first=STRANGE, second=STRANGE, body=BODY)
def test_no_request_is_answered_with_500_or_not_at_all(
    web: httpx.Client, route: tuple[str, str], first: str, second: str, body: Any
) -> None:
    method, path = route
    first, second = (quote(text.encode(errors="surrogatepass"), safe="") for text in (first, second))
    content = None if method in ("GET", "DELETE") else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    with web.stream(method, path.format(first, second), content=content, headers=headers) as response:
        # an event stream of the whole bus has no end: its beginning is enough
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.read()
            refused_or_done(response)


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(
        ["Last-Event-ID", "Idempotency-Key", "traceparent", "Accept", "Content-Type", "Authorization"]
    ),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60)
    | st.sampled_from(["0-0", "9" * 400, "1-1 ", "text/event-stream;q=x", "Bearer", "Bearer  x", "00-0-0-00"]),
    query_id=st.sampled_from(["1-1", "1700000000000-0"]),
)
def test_no_header_is_answered_with_500(web: httpx.Client, name: str, value: str, query_id: str) -> None:
    headers = httpx.Headers({"Content-Type": "application/json"})
    headers = httpx.Headers([*headers.raw, (name.encode(), value.strip().encode("latin-1"))])
    try:
        responses = [
            web.get(f"/queries/{query_id}/events", headers=headers),
            web.post("/query?wait=false", content=b'{"query": "hello"}', headers=headers),
        ]
    except httpx.LocalProtocolError:
        return  # the client itself refuses to send it
    for response in responses:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            refused_or_done(response)


@pytest.mark.parametrize("byte", [b"\x00", b"\x1b", b"\x7f"])
def test_what_is_no_http_is_refused_and_the_connection_closed(stack: HttpStack, byte: bytes) -> None:
    address = httpx.URL(stack.urls[0])
    with socket.create_connection((address.host, address.port or 80), 5) as raw:
        raw.sendall(b"GET /sessions HTTP/1.1\r\nHost: x\r\nLast-Event-ID: a" + byte + b"b\r\n\r\n")
        with raw.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 400 ")
            assert answer.read()


def test_after_all_that_the_stack_still_answers(stack: HttpStack) -> None:
    # what was refused or cancelled left nothing behind
    for number in range(2):
        with stack.web(stack.urls[number]) as web:
            told = web.post("/query", json={"query": f"still there {number}"})
            assert (told.status_code, told.json()["answer"]) == (200, f"You said: still there {number}")
            assert web.get("/ready").status_code == 200
    assert len(stack.pids()) == 6


# ── somebody else's ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_another_users_queries_and_sessions_do_not_exist_for_anybody_else(stack: HttpStack) -> None:
    ann_key, bob_key = stack.key_of("ann"), stack.key_of("bob")
    async with stack.http(0, ann_key) as ann, stack.http(1, bob_key) as bob, stack.http(0) as admin:
        done = (await ann.post("/query", json={"query": "mine", "session_id": "ann-1"})).json()
        running = (await ann.post("/query?wait=false", json={"query": "long mine", "session_id": "ann-2"})).json()
        async with ann.stream("GET", f"/queries/{running['query_id']}/events") as response:
            seen = await take(response, 6)
        last = parsed(blocks(seen)[-1])[0]
        for client in (bob, admin):
            for query_id in (done["query_id"], running["query_id"]):
                for reply in (
                    await client.get(f"/queries/{query_id}"),
                    await client.get(f"/queries/{query_id}?respondent=B"),
                    await client.get(f"/queries/{query_id}/events"),
                    await client.get(f"/queries/{query_id}/events", headers={"Last-Event-ID": last}),
                    await client.get(f"/queries/{query_id}/events", params={"last_event_id": last}),
                    await client.post(f"/queries/{query_id}/cancel"),
                    await client.post("/feedback", json={"query_id": query_id, "stars": 1}),
                ):
                    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), reply.request.url
            for session in ("ann-1", "ann-2"):
                for reply in (await client.get(f"/sessions/{session}"), await client.delete(f"/sessions/{session}")):
                    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), reply.request.url
                # a name is each user's own: this begins another conversation
                body = {"query": "who am I?", "session_id": session}
                own = await client.post("/query?wait=false", json=body)
                assert (own.status_code, own.json()["session_id"] != session) == (202, True)
            listed = (await client.get("/sessions", params={"limit": 200})).json()["sessions"]
            assert not {"ann-1", "ann-2"} & {one["session_id"] for one in listed}
        # the same words for what is not there at all: nobody can probe for ids
        known, unknown = await bob.get(f"/queries/{done['query_id']}"), await bob.get("/queries/1700000000000-0")
        assert known.text == unknown.text
        # hers went on undisturbed
        rest = await ann.get(f"/queries/{running['query_id']}/events")
        assert answer_in(rest.content).endswith("w59 ")
        (turn,) = (await ann.get("/sessions/ann-1")).json()["turns"]
        assert turn["query"] == "mine"
        rated = await ann.post("/feedback", json={"query_id": done["query_id"], "stars": 5})
        assert rated.status_code == 202


async def test_one_idempotency_key_of_two_users_is_two_queries(stack: HttpStack) -> None:
    key = {"Idempotency-Key": "the-same"}
    async with stack.http(0, stack.key_of("carl")) as carl, stack.http(1, stack.key_of("dora")) as dora:
        replies = [await http.post("/query", json={"query": "once"}, headers=key) for http in (carl, dora, carl, dora)]
    ids = [reply.json()["query_id"] for reply in replies]
    assert ids[0] == ids[2] != ids[1] == ids[3]


async def test_a_user_cannot_operate_the_stack(stack: HttpStack) -> None:
    async with stack.http(0, stack.key_of("eve")) as eve:
        for reply in (
            await eve.get("/bus/streams"),
            await eve.get("/bus/events"),
            await eve.get("/dead-letters"),
            await eve.delete("/dead-letters"),
            await eve.post("/dead-letters/1-1/replay"),
            await eve.patch("/participants/generator/settings", json={"temperature": 1}),
            await eve.get("/keys"),
            await eve.post("/keys", json={"name": "x", "user_id": "x", "role": "admin"}),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden"), reply.request.url
    async with stack.http(0, "l2_nobody") as nobody:
        for path in ("/sessions", "/tools", "/participants", "/metrics", "/v1/models", "/queries/1-1", "/bus/streams"):
            assert (await nobody.get(path)).status_code == 401, path


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────

PATH = "/participants/generator/settings"


async def _temperatures(stack: HttpStack, label: str) -> dict[str, set[object]]:
    """By generator replica, the temperatures that it gave the model; both replicas get work."""
    found: dict[str, set[object]] = {}
    async with stack.http(0) as first, stack.http(1) as second:

        async def ask(number: int) -> None:
            query = f"slow {label} {number}"
            http = (first, second)[number % 2]
            told = (await http.post("/query", json={"query": query})).json()
            assert told["answer"] == f"You said: {query}"
            events = (await http.get(f"/queries/{told['query_id']}/events")).content
            replica = parsed(blocks(events)[0])[2]["replica"]
            (asked,) = stack.model.requests(query)
            found.setdefault(replica, set()).add(asked["body"]["options"].get("temperature"))

        # more than one replica's slots
        await asyncio.gather(*(ask(number) for number in range(8)))
    assert len(found) == 2
    return found


async def _concurrency(http: httpx.AsyncClient) -> set[int]:
    parts = (await http.get("/participants")).json()["participants"]
    (generator,) = (part for part in parts if part["name"] == "generator")
    return {replica["concurrency"] for replica in generator["replicas"]}


async def test_a_setting_takes_effect_in_every_replica_and_outlives_a_restart_of_everything(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        before = (await first.get(PATH)).json()["values"]
        assert before["temperature"] is None
        changed = await first.patch(PATH, json={"temperature": 0.37, "concurrency": 5})
        assert changed.status_code == 200
        assert (await second.get(PATH)).json()["values"] == {**before, "temperature": 0.37, "concurrency": 5}
        async with asyncio.timeout(2):
            while await _concurrency(second) != {5}:
                await asyncio.sleep(0.02)
        assert list((await _temperatures(stack, "changed")).values()) == [{0.37}, {0.37}]
        for one in stack.running("generator"):
            one.kill()
        stack.redis.kill()
        await asyncio.to_thread(stack.redis.start)
        await asyncio.to_thread(stack.mend)
        assert await _concurrency(first) == {5}
        assert list((await _temperatures(stack, "restarted")).values()) == [{0.37}, {0.37}]
        restored = await second.patch(PATH, json={"temperature": None, "concurrency": before["concurrency"]})
        assert restored.status_code == 200
        async with asyncio.timeout(2):
            while await _concurrency(first) != {before["concurrency"]}:
                await asyncio.sleep(0.02)
        assert list((await _temperatures(stack, "restored")).values()) == [{None}, {None}]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 2.1},
        {"temperature": -1},
        {"temperature": "hot"},
        {"concurrency": 0},
        {"concurrency": 257},
        {"concurrency": 1.5},
        {"concurrency": 10**30},
        {"model": ""},
        {"model": None},
        {"think": "yes please"},
        {"log_level": "loud"},
        {"num_ctx": 1024},
        {"redis_url": "redis://elsewhere"},
        {"temperature": 1, "unknown": 1},
    ],
)
async def test_a_setting_out_of_range_is_refused_and_changes_nothing(stack: HttpStack, values: dict[str, Any]) -> None:
    async with stack.http(0) as http:
        before = (await http.get(PATH)).json()["values"]
        reply = await http.patch(PATH, json=values)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "invalid_setting"), reply.text
        assert next(iter(set(values) - {"temperature"} or set(values))) in reply.json()["error"]["message"]
        assert (await http.get(PATH)).json()["values"] == before
