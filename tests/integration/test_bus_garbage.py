"""Any bytes in any stream, inbox or key: no process ends, no page is an error, the next question is answered."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from support.http_stack import HttpStack, Rules, http_stack, until

from shared.contracts import PREFIX, SUBJECTS

pytestmark = pytest.mark.slow

CALL = {"name": "web_search", "args": {"query": "LoCAL2"}}
RULES: Rules = [
    {"when": {"user": "###Response to evaluate"}, "respond": {"text": "Right. [RESULT] (5)"}},
    {"when": {"user": "^look it up", "tool_results": 0}, "respond": {"tool_calls": [CALL]}},
    {"when": {"user": "^look it up", "tool_results": 1}, "respond": {"text": "It was found."}},
]
# With their settings: the ranking is made anew for every answer here.
OTHERS: dict[str, dict[str, int]] = {"critic": {}, "reward": {"samples": 50}, "memory": {}}
# A page that is a stream of its own is looked at this long.
LOOK_SECONDS = 0.3
DEEP = b"[" * 900 + b"]" * 900
PAYLOADS = [
    b"", b"no json", b"\xff\xfe", b"null", b"3", b'"text"', b"[]", b"{}", b'{"a":' * 900 + b"1" + b"}" * 900, DEEP,
    b'{"query_id": 5, "call_id": [], "session_id": {}, "participant": null, "values": 7, "tool": ""}',
    b'{"query_id": "x", "args": ' + DEEP + b', "call_id": "c", "tool": "web_search"}',
    b'{"query_id": "\\ud800", "session_id": "\\u0000", "query": "' + b"\\u0000" * 50 + b'", "n": 1e999}',
    b'{"participant": "generator", "values": {"temperature": NaN, "no such": 1}}',
]  # fmt: skip
FIELDS: list[dict[bytes, bytes]] = [
    {b"\xff": b"\xff"},
    {b"": b""},
    {b"type": b"\xff"},
    {b"type": b"from.a.newer.version", b"data": b"\xff"},
    {b"type": b"completed", b"data": DEEP},
    {b"type": b"tool.result"},
    {b"type": b"tool.result", b"call_id": b"\xff", b"payload": b"\xff", b"result": b"3"},
    {b"type": b"wake"},
    {b"id": b"\xff", b"source": b"\xff", b"time": b"soon", b"payload": b"{}"},
    *({b"payload": payload} for payload in PAYLOADS),
    *(
        {name: odd, b"payload": b"{}"}
        for name in (b"deadline", b"attempt", b"time", b"correlation_id", b"session_id", b"user_id", b"traceparent")
        for odd in (b"\xff", b"-1", b"9" * 400, b"nan")
    ),
]
# A key that is overwritten gets the first of these that it was not; one that was not there, the first two.
TYPES = ("string", "stream", "set")
# Without these, a question cannot be taken in: it is refused with a reason, until they are removed.
NEEDED = {"sessions:admin"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    folder = tmp_path_factory.mktemp("stack")
    with pytest.MonkeyPatch.context() as patch:
        # a stream in which nothing happens says so when it has been looked at
        patch.setenv("LOCAL2_GATEWAY_KEEPALIVE", str(LOOK_SECONDS))
        with http_stack(folder, RULES, gateways=1, generators=1) as running:
            for name, settings in OTHERS.items():
                running.people.start(name, **settings)
            until(lambda: not _missing(running), 60, "the others are ready")
            yield running


@pytest.fixture(scope="module")
def bus(stack: HttpStack) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(stack.redis.url) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _nobody_ended(stack: HttpStack, asked: dict[str, str]) -> Iterator[None]:
    before = [one for one in stack.people.started if one.alive]
    yield
    ended = {one.name: one.log[-2_000:] for one in before if not one.alive}
    for name in ended.keys() & OTHERS.keys():
        stack.people.start(name, **OTHERS[name])
    if ended:
        stack.mend()
    assert not ended


@pytest.fixture(scope="module")
def asked(stack: HttpStack) -> dict[str, str]:
    """A finished query that everything is known of, for the pages that show one."""
    return answered(stack)


def _missing(stack: HttpStack) -> set[str]:
    with stack.web() as web:
        parts = web.get("/participants").json()["participants"]
    ready = {part["name"] for part in parts if any(replica["state"] == "ready" for replica in part["replicas"])}
    return {*OTHERS, "generator", "web_search", "web_fetch", "gateway"} - ready


def answered(stack: HttpStack, within: float = 30.0) -> dict[str, str]:
    """Asks a question that needs a tool; it must be answered. A refusal with Retry-After is followed."""
    with stack.web(timeout=within) as web:

        def accepted() -> dict[str, Any] | None:
            response = web.post("/query", json={"query": "look it up, please"})
            assert response.status_code in (200, 429, 503), (response.status_code, response.text)
            return response.json() if response.status_code == 200 else None

        found = until(accepted, within, "the question is accepted", every=0.1)
    assert (found["state"], found["answer"]) == ("completed", "It was found."), found
    return {"query_id": found["query_id"], "session_id": found["session_id"]}


def pages(stack: HttpStack, asked: Mapping[str, str]) -> dict[str, int]:
    """Every GET route with its status; none may be an error of the server."""
    with stack.web() as web:
        # after an error the server closes the connection, perhaps while the next page is asked for
        web.headers["connection"] = "close"
        routes = [path for path, methods in web.get("/openapi.json").json()["paths"].items() if "get" in methods]
        values = {**asked, "name": "generator", "engram_id": f"{asked['query_id']}:A", "topic": "t", "file_id": "f",
                  "fact_id": "f"}  # fmt: skip
        urls = [re.sub(r"\{(\w+)\}", lambda name: values[name[1]], path) for path in routes]
        look = functools.partial(_status, web, params={"query": "found", "last": "1000", "limit": "100", "follow": "0"})
        # a page that goes on for ever is looked at for a while: all of them at once
        with ThreadPoolExecutor(8) as readers:
            found = dict(zip(routes, readers.map(look, urls), strict=True))
    wrong = {path: status for path, status in found.items() if status >= 500 and status != 503}
    assert not wrong, (
        wrong,
        [line for one in stack.gateways for line in one.log.splitlines() if "http.failed" in line][-3:],
    )
    return found


def _status(web: httpx.Client, url: str, params: Mapping[str, str]) -> int:
    until_then = time.monotonic() + LOOK_SECONDS
    try:
        with web.stream("GET", url, params=params, timeout=httpx.Timeout(10, read=LOOK_SECONDS + 5)) as response:
            if response.status_code >= 400:
                response.read()
            for _ in response.iter_bytes():
                if time.monotonic() > until_then:
                    break
            return response.status_code
    except httpx.ReadTimeout:
        # a stream in which nothing happens
        return 200


def works(stack: HttpStack, asked: Mapping[str, str]) -> None:
    assert pages(stack, asked)["/queries/{query_id}"] == 200
    answered(stack)
    until(lambda: not _missing(stack), 20, "everybody is there")


def _streams(bus: redis.Redis) -> set[bytes]:
    return set(bus.scan_iter(match=f"{PREFIX}*", count=1000, _type="STREAM"))


@pytest.mark.parametrize("family", ["subjects", "inboxes", "journals"])
def test_garbage_in_every_stream_stops_nothing(
    stack: HttpStack, bus: redis.Redis, asked: dict[str, str], family: str
) -> None:
    named = {f"{PREFIX}{subject.name}".encode() for subject in SUBJECTS}
    there = {name: [key for key in _streams(bus) if key.startswith(f"{PREFIX}{name}:".encode())]
             for name in ("inbox", "journal")}  # fmt: skip
    others = {key for keys in there.values() for key in keys}
    streams = {
        "subjects": (_streams(bus) | named)
        - others
        - {f"{PREFIX}tool.request".encode(), f"{PREFIX}tool.result".encode()},
        "inboxes": set(there["inbox"]),
        "journals": set(there["journal"]),
    }[family]
    assert len(streams) >= {"subjects": 15, "inboxes": 7, "journals": 1}[family]
    for key in streams:
        for fields in FIELDS:
            bus.xadd(key, fields)
    works(stack, asked)

    def done() -> bool:
        return all(
            group["pending"] == 0 and not group["lag"]
            for key in streams
            if bus.type(key) == b"stream"
            for group in bus.xinfo_groups(key)
            if group["consumers"]
        )

    # An entry that cannot be handled becomes a dead letter, and is not retried forever.
    until(done, 60, "no garbage is left in anybody's hands")
    works(stack, asked)


def _overwrite(bus: redis.Redis, key: str, kind: str) -> None:
    """In one step: others write to these keys at any moment."""
    with bus.pipeline(transaction=True) as steps:
        steps.delete(key)
        match kind:
            case "string":
                steps.set(key, b"\xff")
            case "set":
                steps.sadd(key, b"\xff")
            case _:
                steps.xadd(key, {b"\xff": b"\xff"})
        steps.execute()


def _keys(asked: Mapping[str, str]) -> list[str]:
    session, query = asked["session_id"], asked["query_id"]
    return [
        "dead.letter", "replicas", "starts", "tools", "janitor", "keys", "settings:generator", "settings:web_search",
        "settings-schema:generator", "sessions:admin", f"session:{{{session}}}", f"session:{{{session}}}:history:A",
        f"session:{{{session}}}:deleted", f"journal:{query}:A", f"cancel:{query}",
        f"query:{{local2:query.received}}:{query}", "replica:generator:somebody", "replica:web_search:somebody",
        f"grade:{query}:A", f"verdict:{query}", f"pairs:{{pairs}}:{query}", "pairs:{pairs}:waiting",
        f"memory:state:{query}:A", "memory:gone:admin", "memory:reembedding", "restore:unfinished",
    ]  # fmt: skip


_NAMES = _keys({"session_id": "S", "query_id": "Q"})


@pytest.mark.parametrize("number", range(len(_NAMES)), ids=_NAMES)
def test_a_key_of_another_type_stops_nothing(stack: HttpStack, bus: redis.Redis, number: int) -> None:
    own = answered(stack)
    key = PREFIX + _keys(own)[number]
    usual, before, lives = bus.type(key).decode(), bus.dump(key), max(0, bus.pttl(key))
    try:
        for kind in [kind for kind in TYPES if kind != usual][: 2 if usual == "none" else 1]:
            _overwrite(bus, key, kind)
            pages(stack, own)
            if _NAMES[number] in NEEDED:
                with stack.web() as web:
                    refused = web.post("/query", json={"query": "look it up, please"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_refused")
            else:
                answered(stack)
    finally:
        if before is None:
            bus.delete(key)
        else:
            bus.restore(key, lives, before, replace=True)
    answered(stack)


@pytest.mark.parametrize("subject", ["memory.save", "answer.dialog", "dead.letter"])
def test_a_key_in_the_place_of_one_stream_stops_nothing_of_the_others(
    stack: HttpStack, bus: redis.Redis, subject: str
) -> None:
    own = answered(stack)
    key = PREFIX + subject
    before = bus.dump(key)
    try:
        _overwrite(bus, key, "string")
        answered(stack)
        with stack.web() as web:
            # memory reads the stream beside those of its tools
            session = f"/sessions/{own['session_id']}"
            asked = ("/bus/streams", "/participants", "/memory?query=found", "/memory/topics", session)
            assert {page: web.get(page).status_code for page in asked} == dict.fromkeys(asked, 200)
            assert web.delete(session).status_code == 200
            assert web.get(session).status_code == 404
    finally:
        # in one step: who reads the stream makes it anew at any moment
        if before is None:
            bus.delete(key)
        else:
            bus.restore(key, 0, before, replace=True)
    answered(stack)


@pytest.mark.parametrize("value", [b"", b"\xff", b"null", b"[]", b"{}", b'{"participant": 3}', DEEP, b"running:\xff"])
def test_garbage_in_what_is_kept_stops_nothing(
    stack: HttpStack, bus: redis.Redis, asked: dict[str, str], value: bytes
) -> None:
    own = answered(stack)
    for key in bus.scan_iter(match=f"{PREFIX}*", count=1000, _type="STRING"):
        bus.set(key, value, keepttl=True)
    for key in bus.scan_iter(match=f"{PREFIX}*", count=1000, _type="HASH"):
        # the administrator's key must still open the door
        if key != f"{PREFIX}keys".encode():
            bus.hset(key, mapping=dict.fromkeys(bus.hkeys(key), value))
        bus.hset(key, b"\xff", value)
    for key in bus.scan_iter(match=f"{PREFIX}*", count=1000, _type="ZSET"):
        bus.zadd(key, {b"\xff": 0, b"x" + value: 1e300, value: float("inf")})
    bus.sadd(f"{PREFIX}tools", b"\xff", value, b"no such tool")
    pages(stack, own)
    answered(stack)
    until(lambda: not _missing(stack), 20, "everybody is there again")
