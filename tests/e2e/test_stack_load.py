"""Many clients at once through two gateways: everybody gets the own answer, in order, or a clear refusal."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator

import httpx
import pytest
from support.http_stack import SSE, HttpStack, Rules, answer_in, http_stack

pytestmark = pytest.mark.slow

RULES: Rules = [
    {"when": {"user": "^(slowly .+)$"}, "respond": {"text": "You said: <<1>>", "delay": 0.15}},
    {"respond": {"thinking": "Thinking of <<query>>.", "text": "You said: <<query>>"}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    with http_stack(tmp_path_factory.mktemp("stack"), RULES) as running:
        yield running


# ── one session, two clients ─────────────────────────────────────────────────────────────────────────────────────


async def test_two_queries_of_one_session_at_once_are_answered_in_order_and_the_second_sees_the_first(
    stack: HttpStack,
) -> None:
    stack.model.play(RULES)
    async with stack.http(0) as first, stack.http(1) as second:
        clients = (first, second)

        async def talk(number: int) -> None:
            session = f"pair-{number}"
            asked = [
                client.post("/query", json={"query": f"slowly {session} {place}", "session_id": session})
                for place, client in enumerate(clients)
            ]
            replies = [reply.json() for reply in await asyncio.gather(*asked)]
            for place, told in enumerate(replies):
                assert told["answer"] == f"You said: slowly {session} {place}"
            earlier, later = sorted(replies, key=lambda told: told["query_id"])
            turns = (await first.get(f"/sessions/{session}")).json()["turns"]
            assert [turn["query_id"] for turn in turns] == [earlier["query_id"], later["query_id"]]
            one, two = stack.model.requests(session)
            assert [one["query"], two["query"]] == [earlier["query"], later["query"]]
            # one at a time: the second was asked when the first had been answered
            assert two["at"] >= one["ended_at"]
            said = [(m["role"], m["content"]) for m in two["body"]["messages"] if m["role"] != "system"]
            assert said == [
                ("user", earlier["query"]),
                ("assistant", earlier["answer"]),
                ("user", later["query"]),
            ]

        await asyncio.gather(*(talk(number) for number in range(8)))


async def test_ten_queries_of_one_session_at_once_are_ten_turns_in_the_order_accepted(stack: HttpStack) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        asked = [
            (first, second)[number % 2].post("/query", json={"query": f"number {number}", "session_id": "ten"})
            for number in range(10)
        ]
        replies = [reply.json() for reply in await asyncio.gather(*asked)]
        turns = (await second.get("/sessions/ten")).json()["turns"]
    by_id = sorted(replies, key=lambda told: tuple(map(int, told["query_id"].split("-"))))
    assert [turn["query"] for turn in turns] == [told["query"] for told in by_id]
    for place, told in enumerate(by_id):
        (asked_for,) = stack.model.requests(told["query"])
        said = [m["content"] for m in asked_for["body"]["messages"] if m["role"] == "user"]
        assert said == [earlier["query"] for earlier in by_id[: place + 1]]


# ── many clients ─────────────────────────────────────────────────────────────────────────────────────────────────

CLIENTS = 64
QUERIES = 400


async def _asks(http: httpx.AsyncClient, name: str, numbers: Iterator[int], found: list[tuple[str, str]]) -> None:
    """One client: its next query when its last one is answered. Every third streams; every other has a session."""
    for number in numbers:
        token = uuid.uuid4().hex
        body = {"query": f"{name} wants {token}"}
        if number % 2:
            body["session_id"] = f"session-{name}"
        if number % 3:
            response = await http.post("/query", json=body)
            assert response.status_code == 200, response.text
            told = response.json()
            assert told["query"] == body["query"]
            assert token in told["thinking"]
            found.append((token, told["answer"]))
        else:
            response = await http.post("/query", json=body, headers=SSE)
            assert response.status_code == 200, response.text
            found.append((token, answer_in(response.content)))


async def test_hundreds_of_queries_of_128_clients_at_two_gateways_come_back_to_whom_they_belong(
    stack: HttpStack, record_property: Callable[[str, object], None]
) -> None:
    stack.model.play(RULES)
    numbers = iter(range(QUERIES))
    found: list[tuple[str, str]] = []
    began = time.monotonic()
    async with stack.http(0, timeout=240) as first, stack.http(1, timeout=240) as second:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                for place, http in enumerate((first, second)):
                    clients.create_task(_asks(http, f"client-{place}-{number}", numbers, found))
        took = time.monotonic() - began
        sessions = []
        for offset in range(0, 400, 200):
            page = await first.get("/sessions", params={"limit": 200, "offset": offset})
            sessions += [one["session_id"] for one in page.json()["sessions"]]
    record_property("seconds", round(took, 1))
    assert len(found) == QUERIES
    assert len({token for token, _ in found}) == QUERIES
    assert [pair for pair in found if pair[0] not in pair[1]] == []
    asked = stack.model.requests()
    assert len(asked) == QUERIES, "every query was asked once"
    # a session's prompts have that client's turns and nobody else's
    for request in asked:
        owner = request["query"].split()[0]
        users = [m["content"] for m in request["body"]["messages"] if m["role"] == "user"]
        assert all(said.startswith(f"{owner} ") for said in users)
    assert {name for name in sessions if name.startswith("session-client")} <= {
        f"session-client-{place}-{number}" for place in (0, 1) for number in range(CLIENTS)
    }


# ── back-pressure ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_beyond_the_backlog_queries_are_refused_with_retry_after_and_accepted_ones_are_all_answered(
    stack: HttpStack,
) -> None:
    async with stack.http(0) as first, stack.http(1) as second:
        clients = (first, second)
        before = (await first.get("/participants/gateway/settings")).json()["values"]["max_backlog"]
        assert (await first.patch("/participants/gateway/settings", json={"max_backlog": 10})).status_code == 200
        try:
            accepted: list[httpx.Response] = []
            refused: list[httpx.Response] = []
            # until both gateways have taken the setting up and noticed the backlog
            for number in range(400):
                reply = await clients[number % 2].post("/query?wait=false", json={"query": f"slowly {number} of many"})
                (accepted if reply.status_code == 202 else refused).append(reply)
                if len(refused) >= 40:
                    break
            assert {reply.status_code for reply in refused} == {429}
            assert {reply.json()["error"]["code"] for reply in refused} == {"overloaded"}
            assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused)
            assert len(accepted) >= 10
            for reply in accepted:
                query_id = reply.json()["query_id"]
                told = await clients[0].get(f"/queries/{query_id}/events")
                shown = (await clients[1].get(f"/queries/{query_id}")).json()
                assert answer_in(told.content) == shown["answer"] == f"You said: {shown['query']}"
            # the backlog is gone: the next one is taken
            async with asyncio.timeout(5):
                while (await second.post("/query?wait=false", json={"query": "again"})).status_code != 202:
                    await asyncio.sleep(0.05)
        finally:
            restored = await first.patch("/participants/gateway/settings", json={"max_backlog": before})
            assert restored.status_code == 200
