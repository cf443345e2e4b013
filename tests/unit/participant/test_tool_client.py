"""How requests leave, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from shared.bus import TOGETHER, Command, ConnectionLost, Reply, ReplyError
from shared.bus.keys import result_key
from shared.bus.port import BusFull
from shared.contracts import Outgoing, ToolResultMessage
from shared.envelope import Envelope
from shared.participant.tool_client import _AFTERWARDS, Caller, ToolClient, Trail

# Sent commands, whether they may be repeated, and the replies to come.
Commit = tuple[list[Command], bool, asyncio.Future[list[Reply]]]


class Process:
    """What a client asks of its process: an inbox, a connection that the test answers for, tools that are served."""

    inbox = "inbox"

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.stored: dict[str, bytes] = {}
        self.looked: list[str] = []
        self.hear: Callable[[str, Mapping[bytes, bytes]], None] = lambda _id, _raw: None
        self.bus = SimpleNamespace(link=self, now_ms=lambda: 0, left=self.left, publishing=self.publishing)
        self.registry = SimpleNamespace(served=self.served)

    def left(self, deadline: int, _entry_id: str) -> float:
        return float(deadline - self.bus.now_ms()) / 1000

    def on_inbox(self, _kind: str, hear: Callable[[str, Mapping[bytes, bytes]], None]) -> None:
        self.hear = hear

    async def call(self, name: str, key: str) -> bytes | None:
        assert name == "GET"
        self.looked.append(key)
        return self.stored.get(key)

    async def served(self, tool: str) -> dict[str, Any]:
        return {"name": tool}

    def publishing(self, message: Outgoing) -> Command:
        return ("XADD", message.envelope.subject, message.envelope.attempt, message.envelope.payload)

    def commit(self, commands: Sequence[Command], *, retry: bool = True) -> asyncio.Future[list[Reply]]:
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self.commits.append((list(commands), retry, future))
        return future

    def answer(self, command: Command) -> None:
        request = orjson.loads(command[3])
        result = {"query_id": "q", "call_id": request["call_id"], "tool": request["tool"], "result": "done"}
        fields = {"call_id": request["call_id"], "token": request["token"]}
        payload = orjson.dumps({**result, "duration_ms": 0})
        self.hear("1-1", {**{name.encode(): value.encode() for name, value in fields.items()}, b"payload": payload})


def asking(client: ToolClient, *tools: str) -> list[asyncio.Task[ToolResultMessage]]:
    return [
        asyncio.create_task(client.call(tool, {}, call_id=tool, caller=Caller("q"), timeout=5.0, attempt=1))
        for tool in tools
    ]


async def sent(process: Process, count: int) -> None:
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(process.commits) == count


async def test_an_answer_that_says_nothing_is_read_where_its_worker_has_stored_it() -> None:
    """So does the worker with a large one, behind which everything else in the inbox would have to wait."""
    process = Process()
    (waiting,) = asking(ToolClient(process), "one")  # type: ignore[arg-type]
    await sent(process, 1)
    ((command,), _, writing) = process.commits[0]
    writing.set_result([b"1-1"])
    request = orjson.loads(command[3])
    process.stored[result_key("one", "one")] = orjson.dumps(
        {"query_id": "q", "call_id": "one", "tool": "one", "result": "it is long", "duration_ms": 3}
    )
    for token in ("forged", request["token"]):
        assert not process.looked
        fields = {"type": "tool.result", "call_id": "one", "token": token}
        process.hear("1-2", {name.encode(): value.encode() for name, value in fields.items()})
        # said twice: it is read once, for it may be very long
        process.hear("1-3", {name.encode(): value.encode() for name, value in fields.items()})
        await asyncio.sleep(0)
    assert (await waiting).result == "it is long"
    assert process.looked == [result_key("one", "one")]


@pytest.mark.parametrize(
    "error", [ReplyError("NOPERM no"), BusFull("OOM no"), ConnectionLost("it broke")], ids=lambda error: str(error)
)
async def test_what_is_asked_in_one_tick_leaves_together_and_what_is_refused_takes_nothing_along(
    error: Exception,
) -> None:
    process = Process()
    refused, answered = asking(ToolClient(process), "one", "other")  # type: ignore[arg-type]
    await sent(process, 1)
    ((together, retry, writing),) = process.commits
    assert [command[1:3] for command in together] == [("tool.request.one", 1), ("tool.request.other", 1)]
    assert not retry
    writing.set_exception(error)
    await sent(process, 3)
    # each by itself, and as one that may be there already
    alone = process.commits[1:]
    assert [(command[1:3], retry) for (command,), retry, _ in alone] == [
        (("tool.request.one", None), True),
        (("tool.request.other", None), True),
    ]
    alone[0][2].set_exception(BusFull("OOM no"))
    alone[1][2].set_result([b"2-1"])
    process.answer(alone[1][0][0])
    with pytest.raises(BusFull):
        await refused
    assert (await answered).result == "done"


async def test_a_request_says_for_whom_it_is_and_until_when() -> None:
    process = Process()
    process.bus.now_ms = lambda: 1_000
    envelopes: list[Envelope] = []

    def publishing(message: Outgoing) -> Command:
        envelopes.append(message.envelope)
        return process.publishing(message)

    process.bus.publishing = publishing
    caller = Caller("q", session_id="s", user_id="ann", respondent_id="B", traceparent="trace", deadline=4_000)
    client = ToolClient(process)  # type: ignore[arg-type]
    trail = Trail()
    asked = asyncio.create_task(
        client.call("one", {"a": 1}, call_id="c", caller=caller, timeout=5.0, attempt=1, trail=trail)
    )
    await sent(process, 1)
    (((command,), _, writing),) = process.commits
    (envelope,) = envelopes
    assert (envelope.subject, envelope.time, envelope.attempt) == ("tool.request.one", 1_000, 1)
    assert (envelope.correlation_id, envelope.session_id, envelope.user_id) == ("q", "s", "ann")
    assert (envelope.respondent_id, envelope.traceparent) == ("B", "trace")
    # the caller's deadline is earlier than five seconds
    assert envelope.deadline == 4_000 + 1_000 * _AFTERWARDS
    request = orjson.loads(envelope.payload)
    assert len(request.pop("token")) >= 16
    assert request == {
        "query_id": "q", "call_id": "c", "tool": "one", "args": {"a": 1}, "session_id": "s", "user_id": "ann",
        "reply_to": "inbox",
    }  # fmt: skip
    writing.set_result([b"1-1"])
    process.answer(command)
    assert (await asked).result == "done"
    # where both lie on the bus
    assert trail == Trail(["1-1"], "1-1")


async def test_a_tool_that_nobody_serves_answers_for_whom_it_was_asked() -> None:
    process = Process()

    async def nobody(_tool: str) -> None:
        return None

    process.registry = SimpleNamespace(served=nobody, known=nobody)
    caller = Caller("q", session_id="s", user_id="ann")
    result = await ToolClient(process).call(  # type: ignore[arg-type]
        "one", {}, call_id="c", caller=caller, timeout=5.0, attempt=1
    )
    assert (result.result, result.query_id, result.session_id) == ("[unknown tool: 'one']", "q", "s")


async def test_a_request_whose_stream_is_none_fails_and_those_beside_it_are_made() -> None:
    process = Process()
    refused, answered = asking(ToolClient(process), "one", "other")  # type: ignore[arg-type]
    await sent(process, 1)
    ((together, _, writing),) = process.commits
    writing.set_result([ReplyError("WRONGTYPE no"), b"2-1"])
    process.answer(together[1])
    with pytest.raises(ReplyError, match="WRONGTYPE"):
        await refused
    assert (await answered).result == "done"
    assert len(process.commits) == 1


async def test_many_requests_of_one_tick_leave_so_many_at_a_time_each_of_them_once() -> None:
    process = Process()
    names = [f"tool{number}" for number in range(TOGETHER + 4)]
    asked = asking(ToolClient(process), *names)  # type: ignore[arg-type]
    await sent(process, 2)
    assert [len(commands) for commands, _, _ in process.commits] == [TOGETHER, 4]
    commands = [command for commands, _, _ in process.commits for command in commands]
    assert [command[1] for command in commands] == [f"tool.request.{name}" for name in names]
    for those, _, writing in process.commits:
        writing.set_result([b"1-1"] * len(those))
    for command in commands:
        process.answer(command)
    assert [answer.tool for answer in await asyncio.gather(*asked)] == names
    assert len(process.commits) == 2


@pytest.mark.parametrize("missing", [0, 2])
async def test_who_waits_for_a_tool_asks_for_it_by_its_name_of_today_until_it_is_there(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, asked = Process(), list[str]()

    async def served(tool: str) -> dict[str, Any] | None:
        asked.append(tool)
        return None if len(asked) <= missing else {"name": tool}

    async def known(tool: str) -> bool:
        assert tool == "search_memory"
        return True

    monkeypatch.setattr(process, "registry", SimpleNamespace(served=served, known=known))
    monkeypatch.setattr("shared.participant.tool_client._BETWEEN", 0.0)
    await ToolClient(process).back("recall_memory", {"query": "x"}, 60.0)  # type: ignore[arg-type]
    assert asked == ["search_memory"] * (missing + 1)


async def test_who_waits_for_a_tool_that_nobody_has_ever_served_waits_no_longer() -> None:
    process = Process()

    async def nothing(_tool: str) -> None:
        return None

    process.registry = SimpleNamespace(served=nothing, known=nothing)
    await asyncio.wait_for(ToolClient(process).back("nonsense", {}, 3_600.0), 60)  # type: ignore[arg-type]
