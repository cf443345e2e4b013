"""Deadlines travel with the messages and are kept by the server's clock, whatever the hosts' clocks say."""

from __future__ import annotations

import asyncio
import json

import pytest
import redis
from contract.bus.calling import REQUESTS, Callers, Effects, request
from contract.bus.servers import Server, network
from contract.bus.surface import TOOL_REQUEST, open_bus, result_key
from support.waiting import eventually

SKEWS = pytest.mark.parametrize("ahead", [-3_600.0, -20.0, 20.0, 3_600.0])


def server_ms(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def test_request_carries_the_deadline_of_its_call(server: Server, callers: Callers, client: redis.Redis) -> None:
    """In ms by the server's clock; the smaller of the tool's limit and the query's deadline."""
    async with callers.both(server) as asker:
        before = server_ms(client)
        await asker.ask("x", "c1", timeout=10, deadline=before + 60_000, seconds=0.1)
        await asker.ask("x", "c2", timeout=60, deadline=before + 10_000, seconds=0.1)
        entries = client.xrange(REQUESTS.stream)
    # finished requests stay for a second at least
    found = {json.loads(fields["payload"])["call_id"]: int(fields["deadline"]) for _, fields in entries}
    assert 9_000 < found["c1"] - before < 12_000
    assert 9_000 < found["c2"] - before < 12_000


async def test_request_past_its_deadline_is_not_begun(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    async with callers.both(server) as asker:
        inbox = asker.context.inbox
        late = request("c1", "late", reply_to=inbox)
        await asker.bus.publish(REQUESTS.of(late, deadline=asker.bus.now_ms() - 1))
        answer = await eventually(lambda: _answer(client, inbox, "c1"))
        assert answer["error"] == "the query's deadline has passed"
        assert not client.exists(result_key("probe", "c1"))
        # the call was not begun: a later request of it runs
        assert (await asker.ask("late", "c1", attempt=2)).result == "you said late"
    assert effects.runs("late") == 1


def _answer(client: redis.Redis, inbox: str, call_id: str) -> dict[str, object] | None:
    for _, fields in client.xrange(inbox):
        if fields.get("call_id") == call_id and "payload" in fields:
            return dict(json.loads(fields["payload"]))
    return None


async def test_request_that_waited_past_its_deadline_is_not_begun(
    server: Server, callers: Callers, effects: Effects
) -> None:
    """The only slot is taken until after the deadline."""
    async with callers.both(server, concurrency=1) as asker:
        first = asyncio.create_task(asker.ask("first", "c1", seconds=1.5))
        await eventually(lambda: effects.runs("first") == 1)
        second = await asker.ask("second", "c2", timeout=0.5)
        assert second.error == "tool timeout after 0.5s"
        assert (await first).error is None
        assert (await asker.ask("third", "c3")).error is None
    assert effects.runs("second") == 0


async def test_call_repeated_after_first_requests_deadline_runs(
    server: Server, callers: Callers, effects: Effects, client: redis.Redis
) -> None:
    """A dead worker holds the earlier request, whose deadline passes before it is taken over."""
    client.xgroup_create(REQUESTS.stream, "probe", "0", mkstream=True)
    async with open_bus(server) as bus:
        await bus.publish(REQUESTS.of(request("c1", "x"), deadline=bus.now_ms() + 100))
    assert client.xreadgroup("probe", "dead", {REQUESTS.stream: ">"})
    async with callers.both(server) as asker:
        answer = await asker.ask("x", "c1", timeout=30, attempt=2)
    assert (answer.result, answer.error) == ("you said x", None)
    assert effects.runs("x") == 1


async def test_request_held_up_on_its_way_is_not_run_again(server: Server, callers: Callers, effects: Effects) -> None:
    """The first caller is cut off. The next one asks for the same call meanwhile."""
    async with callers.worker(server), network(server) as net:  # noqa: SIM117
        async with callers.asker(net) as first, callers.asker(server) as second:
            await eventually(first.client.schemas)
            net.freeze()
            held = asyncio.create_task(first.ask("x", "c1", attempt=1))
            # the connection is silent for longer than a request may take to count as new
            await asyncio.sleep(1.5)
            assert (await second.ask("x", "c1", attempt=2)).result == "you said x"
            net.thaw()
            assert (await held).result == "you said x"
    assert effects.runs("x") == 1


@SKEWS
async def test_caller_with_wrong_clock_is_answered(
    ahead: float, server: Server, callers: Callers, effects: Effects
) -> None:
    async with callers.worker(server):
        with callers.asker_process(server, "x", "c1", timeout=20, ahead=ahead):
            answer = await eventually(lambda: effects.answer("c1"))
    assert (answer.result, answer.error) == ("you said x", None)


@SKEWS
async def test_worker_with_wrong_clock_runs_calls(
    ahead: float, server: Server, callers: Callers, effects: Effects
) -> None:
    async with callers.process(server, ahead=ahead), callers.asker(server) as asker:
        deadline = asker.bus.now_ms() + 20_000
        assert (await asker.ask("x", "c1", deadline=deadline)).result == "you said x"


@pytest.mark.parametrize("ahead", [-3_600.0, 3_600.0])
async def test_worker_with_wrong_clock_keeps_deadlines(
    ahead: float, server: Server, callers: Callers, effects: Effects
) -> None:
    async with callers.process(server, ahead=ahead), callers.asker(server) as asker:
        answer = await asker.ask("slow", "c1", seconds=60, timeout=60, deadline=asker.bus.now_ms() + 500)
        assert (answer.error or "").startswith("tool timeout")
        await eventually(lambda: effects.ended("slow") == 1, 5)


async def test_time_of_the_bus_is_the_servers(server: Server, callers: Callers, client: redis.Redis) -> None:
    async with open_bus(server) as bus:
        await bus.publish(TOOL_REQUEST.for_tool("none").of(request("c", "x")))
        before = server_ms(client)
        assert before - 500 <= bus.now_ms() <= server_ms(client) + 500
