"""Cancelling over HTTP, and leaving without cancelling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http_stack import SSE, HttpStack, Rules, answer_in, blocks, event_types, http_stack, parsed, take

pytestmark = pytest.mark.slow

RULES: Rules = [
    # goes on for half a minute unless somebody stops it
    {"when": {"user": "^endless"}, "respond": {"text": [f"w{number} " for number in range(600)], "pace": 0.05}},
    {"when": {"user": "^long"}, "respond": {"text": [f"w{number} " for number in range(30)], "pace": 0.03}},
]
LONG = "".join(f"w{number} " for number in range(30))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    with http_stack(tmp_path_factory.mktemp("stack"), RULES) as running:
        yield running


async def ask(http: httpx.AsyncClient, query: str, **fields: object) -> str:
    accepted = await http.post("/query?wait=false", json={"query": query, **fields})
    assert accepted.status_code == 202, accepted.text
    query_id: str = accepted.json()["query_id"]
    return query_id


async def started(http: httpx.AsyncClient, query_id: str, events: int = 8) -> bytes:
    """The first events of a query that is being answered."""
    async with http.stream("GET", f"/queries/{query_id}/events") as response:
        seen = await take(response, events)
    assert "answer" in event_types(seen)
    return seen


async def cancel(http: httpx.AsyncClient, query_id: str) -> None:
    response = await http.post(f"/queries/{query_id}/cancel")
    assert response.status_code == 200, response.text
    assert response.json()["state"] == "cancelling"


async def end(http: httpx.AsyncClient, query_id: str, timeout: float = 10.0) -> tuple[str, dict[str, Any]]:
    """(event, data) of the terminal entry."""
    async with asyncio.timeout(timeout):
        response = await http.get(f"/queries/{query_id}/events")
    _, kind, data = parsed(blocks(response.content)[-1])
    return kind, data


async def outcome(stack: HttpStack, query: str) -> dict[str, Any]:
    """What became of the one request that the model got for a query, when it is over."""
    async with asyncio.timeout(5):
        while True:
            (asked,) = stack.model.requests(query)
            if asked["ended_at"] is not None:
                return asked
            await asyncio.sleep(0.02)


async def test_a_cancel_at_another_gateway_closes_the_models_connection_within_a_second(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        query_id = await ask(first, "endless one", session_id="cancelled")
        waiting = asyncio.create_task(first.get(f"/queries/{query_id}/events"))
        await started(first, query_id)
        at = time.time()
        await cancel(second, query_id)
        asked = await outcome(stack, "endless one")
        assert asked["outcome"] == "aborted"
        assert asked["ended_at"] - at < 1.0
        kind, data = await end(first, query_id)
        assert kind == "cancelled"
        assert data["answer"].startswith("w0 w1 ")
        # the stream of a client that only looks on ends too
        assert event_types((await waiting).content)[-1] == "cancelled"
        shown = (await second.get(f"/queries/{query_id}?event_log=true")).json()
        assert (shown["state"], shown["finish_reason"]) == ("cancelled", "cancelled")
        assert "query.cancel" in shown["events"]
        # what was said is kept and marked; repeating the cancel changes nothing
        (turn,) = (await first.get("/sessions/cancelled")).json()["turns"]
        assert turn["interrupted"] is True
        again = await first.post(f"/queries/{query_id}/cancel")
        assert (again.status_code, again.json()["state"]) == (200, "cancelled")


async def test_whoever_waits_for_a_cancelled_query_is_told(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        waiting = asyncio.create_task(first.post("/query", json={"query": "endless wait", "session_id": "told"}))
        while not stack.model.requests("endless wait"):
            await asyncio.sleep(0.02)
        streams = [one["session_id"] for one in (await second.get("/sessions")).json()["sessions"]]
        assert "told" in streams
        deleted = (await second.delete("/sessions/told")).json()
        (query_id,) = deleted["cancelled"]
        async with asyncio.timeout(5):
            response = await waiting
        assert (response.status_code, response.json()["state"]) == (200, "cancelled")
        assert response.json()["query_id"] == query_id
        assert (await outcome(stack, "endless wait"))["outcome"] == "aborted"


async def test_a_cancel_holds_when_the_owner_was_killed_before(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        query_id = await ask(first, "endless orphan")
        seen = await started(second, query_id)
        stack.owner(seen).kill()
        await cancel(second, query_id)
        kind, data = await end(second, query_id)
        assert kind == "cancelled"
        assert data["answer"].startswith("w0 ")
        # the new owner did not ask the model again
        assert (await outcome(stack, "endless orphan"))["outcome"] == "aborted"
    stack.mend()


async def test_a_cancel_holds_when_every_generator_was_killed_before(stack: HttpStack) -> None:
    async with stack.http(0) as first:
        query_id = await ask(first, "endless nobody")
        await started(first, query_id)
        for one in stack.running("generator"):
            one.kill()
        await cancel(first, query_id)
        stack.mend()
        kind, _ = await end(first, query_id)
        assert kind == "cancelled"
        assert (await outcome(stack, "endless nobody"))["outcome"] == "aborted"


async def test_a_query_that_waits_for_its_session_is_cancelled_at_once_and_the_others_go_on(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        ids = [await ask(first, f"long {n} in line", session_id="line") for n in range(3)]
        await started(first, ids[0], 4)
        assert (await second.get(f"/queries/{ids[1]}")).json()["state"] == "queued"
        at = time.monotonic()
        await cancel(second, ids[1])
        kind, data = await end(second, ids[1])
        assert (kind, data["answer"]) == ("cancelled", "")
        assert time.monotonic() - at < 1.0
        assert [(await end(first, ids[n]))[1]["answer"] for n in (0, 2)] == [LONG, LONG]
        turns = (await first.get("/sessions/line")).json()["turns"]
        assert [turn["query"] for turn in turns] == ["long 0 in line", "long 2 in line"]
    assert stack.model.requests("long 1 in line") == []


async def test_a_query_that_nobody_has_read_yet_is_cancelled_before_the_model_is_asked(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        # both replicas have four slots
        busy = await asyncio.gather(*(ask(first, f"endless busy {n}") for n in range(8)))
        await asyncio.gather(*(started(second, query_id) for query_id in busy))
        late = await ask(first, "endless late")
        await cancel(second, late)
        assert (await first.get(f"/queries/{late}")).json()["state"] == "queued"
        await asyncio.gather(*(cancel(first, query_id) for query_id in busy))
        kind, _ = await end(first, late)
        assert kind == "cancelled"
        assert {(await end(second, query_id))[0] for query_id in busy} == {"cancelled"}
    assert stack.model.requests("endless late") == []


async def test_a_client_that_leaves_does_not_cancel(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        body = {"query": "long enough", "session_id": "left"}
        async with first.stream("POST", "/query", json=body, headers=SSE) as response:
            query_id = response.headers["x-query-id"]
            await take(response, 5)
        with pytest.raises(httpx.ReadTimeout):
            await second.post("/query", json={"query": "long patience", "session_id": "left"}, timeout=0.3)
        rest = await second.get(f"/queries/{query_id}/events")
        assert answer_in(rest.content) == LONG
        async with asyncio.timeout(5):
            while len(turns := (await first.get("/sessions/left")).json()["turns"]) < 2:
                await asyncio.sleep(0.02)
        assert [(turn["query"], turn["answer"]) for turn in turns] == [("long enough", LONG), ("long patience", LONG)]
        assert {turn["interrupted"] for turn in turns} == {False}
    assert (await outcome(stack, "long enough"))["outcome"] == "done"
