"""How requests leave, without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from shared.bus import TOGETHER, Command, ConnectionLost, Reply, ReplyError
from shared.bus.keys import result_key
from shared.bus.replies import BusFull
from shared.contracts import NOT_RUN, Outgoing, ToolResultMessage
from shared.envelope import Envelope
from shared.errors import BusUnavailable, PermanentError
from shared.participant import tool_client
from shared.participant.tool import RUNNING
from shared.participant.tool_client import _AFTERWARDS, Caller, ToolClient, new_token
from shared.participant.tool_watch import attributes_of

# Sent commands, whether they may be repeated, and the replies to come.
Commit = tuple[list[Command], bool, asyncio.Future[list[Reply]]]


def _nothing_cached(_tool: str) -> None:
    """The registry has to be asked."""


class Process:
    """What a client asks of its process: an inbox, a connection that the test answers for, tools that are served."""

    inbox = "inbox"

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.stored: dict[str, bytes] = {}
        self.looked: list[str] = []
        self.removed: list[str] = []
        # of every tool
        self.says: dict[str, Any] = {}
        self.hear: Callable[[str, Mapping[bytes, bytes]], None] = lambda _id, _raw: None
        self.bus = SimpleNamespace(link=self, now_ms=lambda: 0, left=self.left, publishing=self.publishing)
        self.registry = SimpleNamespace(cached=_nothing_cached, served=self.served, overloaded=lambda _tool: False)

    def left(self, deadline: int, _entry_id: str) -> float:
        return float(deadline - self.bus.now_ms()) / 1000

    def on_inbox(self, _kind: str, hear: Callable[[str, Mapping[bytes, bytes]], None]) -> None:
        self.hear = hear

    async def call(self, name: str, key: str) -> bytes | None:
        if name == "UNLINK":
            self.removed.append(key)
            raise BusUnavailable("away")
        assert name == "GET"
        self.looked.append(key)
        return self.stored.get(key)

    async def served(self, tool: str) -> dict[str, Any]:
        return {"name": tool, **self.says}

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
    caller = Caller("q", session_id="s", user_id="ann", respondent_id="B", traceparent="trace", deadline=4_000,
                    time_zone="Asia/Tokyo")  # fmt: skip
    client = ToolClient(process)  # type: ignore[arg-type]
    asked = asyncio.create_task(client.call("one", {"a": 1}, call_id="c", caller=caller, timeout=5.0, attempt=1))
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
        "reply_to": "inbox", "time_zone": "Asia/Tokyo",
    }  # fmt: skip
    writing.set_result([b"1-1"])
    process.answer(command)
    assert (await asked).result == "done"


async def test_a_tool_that_nobody_serves_answers_for_whom_it_was_asked() -> None:
    process = Process()

    async def nobody(_tool: str) -> None:
        return None

    process.registry = SimpleNamespace(cached=_nothing_cached, served=nobody, known=nobody)
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

    monkeypatch.setattr(process, "registry", SimpleNamespace(cached=_nothing_cached, served=served, known=known))
    monkeypatch.setattr("shared.participant.tool_client._BETWEEN", 0.0)
    await ToolClient(process).back("recall_memory", {"query": "x"}, 60.0)  # type: ignore[arg-type]
    assert asked == ["search_memory"] * (missing + 1)


async def test_who_waits_for_a_tool_that_nobody_has_ever_served_waits_no_longer() -> None:
    process = Process()

    async def nothing(_tool: str) -> None:
        return None

    process.registry = SimpleNamespace(cached=_nothing_cached, served=nothing, known=nothing)
    await asyncio.wait_for(ToolClient(process).back("nonsense", {}, 3_600.0), 60)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("announced", "limit", "usual", "waited"),
    [
        (None, None, 15.0, 15.0), (14.0, None, 15.0, 15.0), (30, None, 15.0, 30), (30.5, None, 15.0, 30.5),
        (9_999.0, None, 15.0, 3_600.0), ("soon", None, 15.0, 15.0), (9_999.0, None, 7_200.0, 3_600.0),
    ],
)  # fmt: skip
async def test_a_call_is_waited_for_as_long_as_its_tool_says_by_its_name_of_today(
    announced: Any, limit: None, usual: float, waited: float
) -> None:
    process, asked = Process(), list[str]()

    async def served(tool: str) -> dict[str, Any]:
        asked.append(tool)
        return {"timeout": announced}

    process.registry.served = served
    client = ToolClient(process)  # type: ignore[arg-type]
    assert await client.patience("recall_memory", {"query": "x"}, limit, usual) == waited
    assert await client.patience("recall_memory", {"topic": "x"}, limit, usual) == waited
    assert asked == ["search_memory", "recall_topic"]


@pytest.mark.parametrize(
    ("respondent", "said", "error"),
    [("A", {"read_only": False}, None), ("B", {"read_only": None}, None), ("B", {}, None),
     ("B", {"read_only": False}, NOT_RUN), ("B", None, "tool unavailable")],
)  # fmt: skip
async def test_what_changes_something_is_not_run_for_an_answer_that_nobody_sees(
    respondent: str, said: dict[str, Any] | None, error: str | None
) -> None:
    process = Process()

    async def served(tool: str) -> dict[str, Any] | None:
        return said if tool == "save_topic" else {}

    async def known(_tool: str) -> bool:
        return True

    process.registry.served, process.registry.known = served, known
    client, caller = ToolClient(process), Caller("q", respondent_id=respondent)  # type: ignore[arg-type]
    call = asyncio.create_task(client.call("memory_save", {}, call_id="c", caller=caller, timeout=5.0, attempt=1))
    await sent(process, 1 if error is None else 0)
    for (command,), _, writing in process.commits:
        writing.set_result([b"1-1"])
        process.answer(command)
    told = await call
    assert (told.tool, told.error, told.result) == ("save_topic", error, f"[{error}]" if error else "done")


async def test_a_tool_that_nobody_serves_is_waited_for_as_usual() -> None:
    process = Process()

    async def nobody(_tool: str) -> None:
        return None

    process.registry = SimpleNamespace(cached=_nothing_cached, served=nobody)
    assert await ToolClient(process).patience("one", {}, None, 15.0) == 15.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("served", "known", "internal", "error"),
    [
        (None, False, False, "unknown tool: 'one'"),
        (None, True, False, "tool unavailable"),
        (None, True, True, "tool unavailable"),
        # no model names an operation, and no participant takes a model's tool for one
        ({"internal": True}, True, False, "unknown tool: 'one'"),
        ({}, True, True, "unknown tool: 'one'"),
    ],
)
async def test_a_tool_that_is_not_there_is_not_asked(
    served: dict[str, Any] | None, known: bool, internal: bool, error: str
) -> None:
    process = Process()

    async def serving(_tool: str) -> dict[str, Any] | None:
        return served

    async def is_known(_tool: str) -> bool:
        return known

    process.registry = SimpleNamespace(cached=_nothing_cached, served=serving, known=is_known)
    client = ToolClient(process)  # type: ignore[arg-type]
    caller = Caller("q", session_id="s")
    assert await client.call(
        "one", {}, call_id="c", caller=caller, timeout=5.0, internal=internal
    ) == ToolResultMessage(
        query_id="q", call_id="c", tool="one", result=f"[{error}]", error=error, duration_ms=0, session_id="s"
    )
    assert process.commits == []


@pytest.mark.parametrize("internal", [False, True])
async def test_the_result_of_an_operation_is_kept_no_longer_than_it_takes_to_read_it(internal: bool) -> None:
    process = Process()
    process.says = {"internal": True} if internal else {}
    client = ToolClient(process)  # type: ignore[arg-type]
    asked = asyncio.create_task(client.call("one", {}, call_id="c", caller=Caller("q"), timeout=5.0, internal=internal))
    await sent(process, 1)
    (((command,), _, writing),) = process.commits
    # nobody has said how often it was asked for
    assert command[2] is None
    writing.set_result([b"1-1"])
    process.answer(command)
    assert (await asked).result == "done"
    assert process.removed == ([result_key("one", "c")] if internal else [])
    # nobody waits for it any more
    assert client._waiting == {}


async def test_a_call_that_was_asked_for_before_keeps_its_token_and_is_asked_for_by_its_name_of_today() -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    asked = asyncio.create_task(
        client.call("recall_memory", {"query": 2**70}, call_id="c", caller=Caller("q"), timeout=5.0, token="before")
    )
    await sent(process, 1)
    (((command,), _, _),) = process.commits
    # what orjson does not know is sent all the same
    said = {"tool": "search_memory", "token": "before", "args": {"query": 2**70}, "call_id": "c", "query_id": "q"}
    assert command[1] == "tool.request.search_memory"
    assert json.loads(command[3]).items() >= said.items()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert client._waiting == {}


async def test_what_json_cannot_carry_is_not_sent() -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    answer = await client.call("one", {"x": object()}, call_id="c", caller=Caller("q"), timeout=5.0)
    assert answer.error is not None
    assert answer.error.startswith("the arguments cannot be sent: ")
    assert answer.result.startswith("[tool error: ")
    assert process.commits == []


async def test_two_who_wait_for_one_call_are_both_answered_and_one_may_leave() -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    both = [
        asyncio.create_task(client.call("one", {}, call_id="c", caller=Caller("q"), timeout=5.0, token="t"))
        for _ in range(3)
    ]
    await sent(process, 1)
    ((commands, _, _),) = process.commits
    both.pop().cancel()
    await asyncio.sleep(0)
    process.answer(commands[0])
    assert {answer.result for answer in await asyncio.gather(*both)} == {"done"}
    assert client._waiting == {}


def answered(process: Process, command: Command, **other: str) -> None:
    """An answer of the tool's worker, or almost."""
    request = orjson.loads(command[3])
    result = {"query_id": "q", "call_id": request["call_id"], "tool": request["tool"], "result": "so", "duration_ms": 0}
    fields = {"call_id": request["call_id"], "token": request["token"], "payload": orjson.dumps(result).decode()}
    process.hear("1-9", {name.encode(): value.encode() for name, value in {**fields, **other}.items()})


async def test_what_nobody_asked_for_is_counted_and_heard_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    process, counted = Process(), list[str]()
    monkeypatch.setattr(tool_client, "ignored", counted.append)
    client = ToolClient(process)  # type: ignore[arg-type]
    waiting = asyncio.create_task(client.call("one", {}, call_id="c", caller=Caller("q"), timeout=60.0))
    await sent(process, 1)
    (((command,), _, writing),) = process.commits
    writing.set_result([b"1-1"])
    await asyncio.sleep(0)
    for other, why in (
        ({"call_id": "never"}, "late"), ({"token": "forged"}, "token"), ({"token": ""}, "token"),
        ({"payload": "{"}, "malformed"),
    ):  # fmt: skip
        answered(process, command, **other)
        assert counted.pop() == why
    process.hear("1-2", {})
    assert counted.pop() == "late"
    assert (waiting.done(), process.looked) == (False, [])
    answered(process, command)
    assert (await waiting).result == "so"
    assert counted == []


class Loop:
    """The loop with a clock that the test sets, and limits that it turns."""

    def __init__(self, client: ToolClient) -> None:
        self._of = asyncio.get_running_loop()
        self.now = self._of.time()
        self.limits: list[float] = []
        self.client = client
        client._loop = self  # type: ignore[assignment]
        client._deadlines = self  # type: ignore[assignment]
        self.dropped = 0
        self.call: Any = None

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def add(self, call: Any, at: float) -> None:
        self.call = call
        self.limits.append(round(at - self.now, 6))

    def drop(self, call: Any) -> None:
        assert call is self.call
        self.dropped += 1

    async def passes(self, seconds: float) -> None:
        """So much time, and then the limit."""
        self.now += seconds
        self.client._due(self.call)
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("timeout", "grace", "deadline", "until", "seconds"),
    [
        (5.0, 0.0, None, 5.0, 5.0), (0.5, 0.0, None, 0.5, 0.5), (5.0, 2.0, None, 7.0, 5.0), (5.0, 0.0, 3_000, 3.0, 3.0),
        (5.0, 2.0, 3_000, 3.0, 3.0), (5.0, 2.0, 6_000, 6.0, 5.0), (5.0, 2.0, 9_000, 7.0, 5.0),
        (5.0, 0.5, -9_000, 0.0, 0.0),
    ],
)  # fmt: skip
async def test_a_call_is_looked_for_every_second_and_given_up_at_its_end(
    timeout: float, grace: float, deadline: int | None, until: float, seconds: float
) -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    loop = Loop(client)
    caller = Caller("q", session_id="s", deadline=deadline)
    waiting = asyncio.create_task(client.call("one", {}, call_id="c", caller=caller, timeout=timeout, grace=grace))
    await sent(process, 1)
    # the tool itself is ended just behind it
    assert loop.call.request.deadline == int((until + _AFTERWARDS) * 1000)
    process.commits[0][2].set_result([b"1-1"])
    # what is only expected is none
    process.stored[result_key("one", "c")] = RUNNING + b"99"
    left = until
    while True:
        pause = loop.limits[-1]
        assert pause == pytest.approx(min(1.0, left))
        assert not waiting.done()
        await loop.passes(pause)
        left -= pause
        if left <= 0:
            break
    assert await waiting == ToolResultMessage(
        query_id="q", call_id="c", tool="one", result=f"[tool timeout after {seconds:g}s]",
        error=f"tool timeout after {seconds:g}s", duration_ms=round(seconds * 1000), session_id="s",
        request_id="1-1",
    )  # fmt: skip
    assert process.looked == [result_key("one", "c")] * len(loop.limits)
    assert loop.dropped == 1
    # nobody looks any more
    await loop.passes(1.0)
    assert len(process.looked) == len(loop.limits)


async def test_an_answer_that_went_astray_is_found_where_its_worker_has_stored_it() -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    loop = Loop(client)
    waiting = asyncio.create_task(client.call("one", {}, call_id="c", caller=Caller("q"), timeout=5.0))
    await sent(process, 1)
    # neither a store that is away nor one that holds nonsense ends the waiting
    process.stored[result_key("one", "c")] = b"nonsense"
    await loop.passes(1.0)

    async def away(*_command: Any) -> None:
        raise BusUnavailable("away")

    process.call, there = away, process.call  # type: ignore[method-assign, assignment]
    await loop.passes(1.0)
    assert not waiting.done()
    process.call = there  # type: ignore[method-assign]
    stored = {"query_id": "q", "call_id": "c", "tool": "one", "result": "stored", "duration_ms": 3}
    process.stored[result_key("one", "c")] = orjson.dumps(stored)
    await loop.passes(1.0)
    assert (await waiting).result == "stored"
    assert loop.limits == [1.0, 1.0, 1.0]
    assert not client._looking


async def test_who_waits_is_told_of_a_bug_in_the_looking() -> None:
    process = Process()
    client = ToolClient(process)  # type: ignore[arg-type]
    loop = Loop(client)
    (waiting,) = asking(client, "one")
    await sent(process, 1)

    async def bug(*_command: Any) -> None:
        raise ZeroDivisionError

    process.call = bug  # type: ignore[method-assign, assignment]
    await loop.passes(1.0)
    with pytest.raises(ZeroDivisionError):
        await waiting
    assert not client._looking


@pytest.mark.parametrize(
    ("error", "result"),
    [(PermanentError("too large"), "[tool error: too large]"), (ConnectionLost("it broke"), None)],
    ids=str,
)
async def test_a_request_that_can_never_be_sent_is_the_calls_result_and_a_lost_one_is_asked_again(
    error: Exception, result: str | None
) -> None:
    process = Process()
    (waiting,) = asking(ToolClient(process), "one")  # type: ignore[arg-type]
    await sent(process, 1)
    process.commits[0][2].set_exception(error)
    if result is not None:
        answer = await waiting
        assert (answer.result, answer.error, len(process.commits)) == (result, "too large", 1)
    else:
        await sent(process, 2)
        ((again,), retry, writing) = process.commits[1]
        assert (again[1:3], retry) == (("tool.request.one", None), True)
        unheard: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unheard.append(context))
        writing.cancel()
        await asyncio.sleep(0)
        assert (waiting.done(), unheard) == (False, [])
        process.answer(again)
        assert (await waiting).result == "done"


async def test_a_request_that_fails_fails_its_call() -> None:
    process = Process()
    (waiting,) = asking(ToolClient(process), "one")  # type: ignore[arg-type]
    await sent(process, 1)
    process.commits[0][2].set_exception(BusUnavailable("away"))
    with pytest.raises(BusUnavailable):
        await waiting
    assert len(process.commits) == 1


async def test_who_has_left_before_his_request_did_asks_nothing() -> None:
    process = Process()
    one, other = asking(ToolClient(process), "one", "other")  # type: ignore[arg-type]
    # as far as the loop's next turn, in which they would leave
    await asyncio.sleep(0)
    one.cancel()
    await sent(process, 1)
    assert [command[1] for command in process.commits[0][0]] == ["tool.request.other"]
    process.answer(process.commits[0][0][0])
    assert (await other).result == "done"


async def test_a_call_that_is_watched_passes_its_own_span_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process, watched = Process(), list[Any]()
    envelopes: list[Envelope] = []

    def publishing(message: Outgoing) -> Command:
        envelopes.append(message.envelope)
        return process.publishing(message)

    async def watching(attributes: Any, traceparent: str, send: Any) -> Any:
        watched.append((attributes, traceparent))
        return await send("span")

    process.bus.publishing = publishing
    monkeypatch.setattr(tool_client, "watching", lambda: True)
    monkeypatch.setattr(tool_client, "watched_request", watching)
    caller = Caller("q", session_id="s", traceparent="trace")
    client = ToolClient(process)  # type: ignore[arg-type]
    asked = asyncio.create_task(client.call("recall_memory", {}, call_id="c", caller=caller, timeout=5.0))
    await sent(process, 1)
    process.answer(process.commits[0][0][0])
    assert (await asked).result == "done"
    assert watched == [(attributes_of("search_memory", "c", "q", "s"), "trace")]
    assert [(one.traceparent, one.correlation_id) for one in envelopes] == [("span", "q")]


def test_who_is_asked_for_is_said_in_every_message_on_his_behalf() -> None:
    caller = Caller("q", session_id="s", user_id="ann", respondent_id="B", deadline=5, traceparent="trace")
    assert caller.headers() == {
        "correlation_id": "q", "session_id": "s", "user_id": "ann", "respondent_id": "B", "traceparent": "trace",
        "deadline": 5,
    }  # fmt: skip
    assert Caller("q").headers() == {
        "correlation_id": "q", "session_id": "", "user_id": "", "respondent_id": "A", "traceparent": "",
        "deadline": None,
    }  # fmt: skip
    tokens = {new_token() for _ in range(20)}
    assert (len(tokens), {len(token) for token in tokens}) == (20, {32})


async def test_a_store_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()

    async def hangs(*_command: Any) -> None:
        await asyncio.Event().wait()

    process.call = hangs  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(tool_client, "_LAST_LOOK", 0.01)
    client = ToolClient(process)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        answer = await client.call("one", {}, call_id="c", caller=Caller("q"), timeout=0.01)
    assert answer.result == "[tool timeout after 0.01s]"


async def test_who_has_no_time_waits_for_no_tool() -> None:
    process, asked = Process(), list[str]()

    async def served(tool: str) -> None:
        asked.append(tool)

    process.registry = SimpleNamespace(cached=_nothing_cached, served=served, known=served)
    client = ToolClient(process)  # type: ignore[arg-type]
    Loop(client)
    await client.back("one", {}, 0.0)
    assert asked == []


async def test_models_are_offered_what_the_registry_has() -> None:
    process = Process()

    async def tools() -> dict[str, Any]:
        return {"one": {"type": "function"}}

    process.registry = SimpleNamespace(tools=tools)
    assert await ToolClient(process).schemas() == {"one": {"type": "function"}}  # type: ignore[arg-type]
