"""What a tool's worker does with each request: what it looks up, what it writes, and what it never does twice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from pydantic import BaseModel, Field
from support.slots import uncounted

from shared.bus import START, Command, Delivery, Entry
from shared.bus.keys import result_key
from shared.bus.scripts import FIND_BY_TEXT
from shared.bus.slots import Slots
from shared.contracts import (
    QUERY_CANCEL,
    TOOL_REQUEST,
    TOOL_RESULT,
    TOOL_SCHEMA_REQUEST,
    Outgoing,
    QueryCancel,
    ToolFunction,
    ToolRequest,
    ToolResultMessage,
    ToolSchema,
    encode,
)
from shared.envelope import Envelope, Message
from shared.errors import DecodeError, ToolError
from shared.participant.inbox import inbox_bound
from shared.participant.settings import Settings
from shared.participant.tool import (
    RUNNING,
    Cancelled,
    Offered,
    Tool,
    ToolResult,
    Tools,
    ToolWork,
    _arguments,
    _Call,
    _older_names,
    failure,
    open_tools,
    tool_service,
)

NOW = 1_780_000_000_000
CALL = "7-0:A:0:0"
STREAM = TOOL_REQUEST.for_tool("probe").stream
STORED = result_key("probe", CALL)
Run = Callable[["Args", ToolRequest], Coroutine[Any, Any, ToolResult]]


class Args(BaseModel):
    """Says something back."""

    text: str = Field(min_length=1)


class Bus:
    """A bus on which nothing stands but what the test puts there; `asked` are the commands that were sent."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.earlier: list[Entry] = []
        self.unfinished: set[str] = set()
        self.asked: list[Command] = []
        self.link = self

    def now_ms(self) -> int:
        return NOW

    def left(self, deadline: int, _entry_id: str) -> float:
        return (deadline - NOW) / 1000

    async def call(self, *command: Any) -> Any:
        self.asked.append(command)
        if command[0] == "GET":
            return self.stored.get(command[1])
        # in pages of one, as of a long stream
        after = b"" if not self.earlier else self.earlier[0][0].encode()
        return [after, *([after] if after else [])]

    async def range(self, stream: str, first: str, last: str) -> list[Entry]:
        assert (stream, first) == (STREAM, last)
        return [self.earlier.pop(0)]

    async def finished(self, stream: str, group: str, entry_id: str) -> bool:
        assert (stream, group) == (STREAM, "probe")
        return entry_id not in self.unfinished

    def publishing(self, message: Outgoing) -> Command:
        return ("PUBLISH", message)


def says(text: str) -> Run:
    async def run(_args: Args, _request: ToolRequest) -> ToolResult:
        return ToolResult(text)

    return run


async def echo(args: Args, _request: ToolRequest) -> ToolResult:
    return ToolResult(f"you said {args.text}", {"n": 1})


def request(**values: Any) -> ToolRequest:
    said = {"query_id": "7-0", "call_id": CALL, "tool": "probe", "args": {"text": "hi"}, "session_id": "s"}
    return ToolRequest(**{**said, "user_id": "ann", "reply_to": "inbox", "token": "secret", **values})


class Worker:
    def __init__(self, run: Run = echo, *, internal: bool = False, retention: int = 86_400) -> None:
        self.bus = Bus()
        self.cancelled = Cancelled()
        self.tools = Tools()
        self.tools.runs["probe"] = run
        self.work = ToolWork("probe", Args, lambda: self.tools, self.cancelled, internal=internal)
        context = SimpleNamespace(bus=self.bus, participant="probe", settings=SimpleNamespace(retention=retention))
        self.route = self.work.route(cast(Any, context))

    def delivery(self, asked: ToolRequest, deliveries: int = 1, *, late: int = 0, **headers: Any) -> Delivery:
        headers = {"time": str(NOW - late), "attempt": "1", "session_id": "s", "user_id": "ann", "respondent_id": "B",
                   "traceparent": "trace", "payload": encode(asked), **headers}  # fmt: skip
        fields = [part for name, value in headers.items() if value is not None
                  for part in (name.encode(), value if isinstance(value, bytes) else str(value).encode())]  # fmt: skip

        async def unblock() -> bool:
            return False

        return Delivery(STREAM, f"{NOW}-5", fields, deliveries, Slots(1, {STREAM: None}, 3, unblock, uncounted))

    async def does(self, asked: ToolRequest | None = None, deliveries: int = 1, **how: Any) -> list[Command]:
        return list(await self.route.handler(self.delivery(asked or request(), deliveries, **how)))


def answer(result: bytes, *, token: str = "secret") -> Command:
    return (
        "XADD", "inbox", "NOMKSTREAM", *inbox_bound(len(result)), "*",
        "type", "tool.result", "call_id", CALL, "token", token, "payload", result,
    )  # fmt: skip


def read(command: Command) -> dict[str, Any]:
    """The result in an answer to the requester."""
    return cast(dict[str, Any], orjson.loads(command[-1]))


async def test_a_call_is_run_stored_answered_and_told_without_looking_anything_up() -> None:
    on = Worker()
    stored, answered, told = await on.does()
    assert read(answered) == {
        "query_id": "7-0", "call_id": CALL, "tool": "probe", "result": "you said hi", "error": None, "data": {"n": 1},
        "duration_ms": read(answered)["duration_ms"], "session_id": "s", "request_id": f"{NOW}-5",
    }  # fmt: skip
    assert 0 <= read(answered)["duration_ms"] < 60_000
    assert answered == answer(answered[-1])
    assert stored == ("SET", STORED, answered[-1], "EX", 86_400)
    envelope = told[1].envelope
    assert (envelope.subject, envelope.payload, envelope.time) == ("tool.result.probe", answered[-1], NOW)
    assert (envelope.correlation_id, envelope.session_id, envelope.user_id) == ("7-0", "s", "ann")
    assert (envelope.respondent_id, envelope.traceparent, envelope.causation_id) == ("B", "trace", f"{NOW}-5")
    assert on.bus.asked == []
    assert on.tools.calls == 0


async def test_a_large_result_is_stored_and_told_and_the_inbox_says_only_that_it_is_there() -> None:
    around = len((await Worker(says("")).does())[0][2])
    for size, there in ((60_000, True), (65_536 - around, True), (65_537 - around, False), (70_000, False)):
        stored, answered, _told = await Worker(says("x" * size)).does()
        assert len(stored[2]) > size
        whole = answer(stored[2])
        # one that says nothing takes no room
        alone = ("XADD", "inbox", "NOMKSTREAM", "*", *whole[whole.index("type") : -2])
        assert answered == (whole if there else alone)


async def test_nobody_is_answered_who_gave_no_inbox_and_an_operation_between_participants_is_told_to_nobody() -> None:
    assert [command[0] for command in await Worker().does(request(reply_to=""))] == ["SET", "PUBLISH"]
    assert [command[0] for command in await Worker(internal=True).does()] == ["SET", "XADD"]


@pytest.mark.parametrize(
    ("how", "looked_up"),
    [
        ({}, False),
        ({"deliveries": 2}, True),
        ({"attempt": "2"}, True),
        # who does not say how often he asked may have asked before
        ({"attempt": None}, True),
        ({"late": 999}, False),
        ({"late": 1_000}, True),
        ({"late": -1_000}, True),
    ],
)
async def test_only_what_may_have_been_asked_before_is_looked_up(how: dict[str, Any], looked_up: bool) -> None:
    on = Worker()
    assert len(await on.does(**how)) == 3
    looks = [FIND_BY_TEXT((STREAM,), "-", f"{NOW}-5", CALL), ("GET", STORED)]
    assert [command[: len(looks[0])] for command in on.bus.asked] == (looks if looked_up else [])
    # there it is answered for this request, and neither run nor stored nor told again
    on.bus.stored[STORED] = b'{"result":"of the first time"}'
    assert (await on.does(**how) == [answer(b'{"result":"of the first time"}')]) is looked_up


async def test_a_result_that_is_only_expected_is_none() -> None:
    on = Worker()
    on.bus.stored[STORED] = RUNNING + b"5"
    assert [command[0] for command in await on.does(deliveries=2)] == ["SET", "XADD", "PUBLISH"]


async def test_a_request_is_left_to_an_earlier_one_that_is_not_finished_and_says_until_when_it_waits() -> None:
    def entry(number: int, **values: Any) -> Entry:
        return f"{NOW - 9}-{number}", [b"payload", encode(request(**values))]

    on = Worker()
    # others of the stream: of another call, of nobody who can be understood, and one that is finished
    others = [entry(1, call_id="other"), (f"{NOW - 9}-2", [b"payload", CALL.encode()]), entry(3)]
    on.bus.unfinished = {f"{NOW - 9}-{number}" for number in (1, 2, 4)}
    on.bus.earlier = [*others, entry(4)]
    until = RUNNING + str(NOW + 500).encode()
    assert await on.does(attempt="2", deadline=NOW + 500) == [("SET", STORED, until, "NX", "PX", 500)]
    # each page begins behind the one before
    starts = ["-", *(f"{NOW - 9}-{number}" for number in (1, 2, 3))]
    assert [command[4] for command in on.bus.asked] == starts
    past: dict[str, Any] = {"deadline": NOW}
    for nothing_to_wait_for in ({}, past):
        on.bus.earlier = [entry(4)]
        assert await on.does(attempt="2", **nothing_to_wait_for) == []
    on.bus.earlier = others
    assert len(await on.does(attempt="2")) == 3


async def never(_args: Args, _request: ToolRequest) -> ToolResult:
    raise AssertionError("it was run")


@pytest.mark.parametrize("expected", [None, b"", RUNNING, RUNNING + b"x", RUNNING + str(NOW).encode()])
async def test_a_call_past_its_deadline_is_not_begun_and_may_be_asked_for_again(expected: bytes | None) -> None:
    on = Worker(never)
    if expected is not None:
        on.bus.stored[STORED] = expected
    answered, _told = await on.does(deadline=NOW)
    assert read(answered)["error"] == "the query's deadline has passed"
    assert read(answered)["result"] == "[tool error: the query's deadline has passed]"
    assert read(answered)["request_id"] == f"{NOW}-5"


async def test_a_call_that_a_later_request_waits_for_is_run_until_then() -> None:
    async def hangs(_args: Args, _request: ToolRequest) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    on = Worker()
    on.bus.stored[STORED] = RUNNING + str(NOW + 60_000).encode()
    assert read((await on.does(deadline=NOW - 5))[1])["error"] is None
    # nothing is left of a call that has ended
    on.work.cancel("7-0")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    for deadline, later in ((NOW + 100, None), (NOW - 5, NOW + 100)):
        on = Worker(hangs)
        if later:
            on.bus.stored[STORED] = RUNNING + str(later).encode()
        async with asyncio.timeout(30):
            stored, answered, _told = await on.does(deadline=deadline)
        assert stored[0] == "SET"
        assert read(answered)["error"] == "the query's deadline has passed"
        assert on.tools.calls == 0


async def test_a_call_has_a_limit_as_long_as_it_runs_none_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Limits:
        def __init__(self, _expired: Any) -> None:
            pass

        def add(self, call: Any, at: float) -> None:
            done.append((call, at))

        def drop(self, call: Any) -> None:
            done.append(call)

    monkeypatch.setattr("shared.participant.tool.Deadlines", Limits)
    on = Worker()
    began = asyncio.get_running_loop().time()
    assert len(await on.does(deadline=NOW + 500)) == 3
    (call, at), dropped = done
    assert began <= at - 0.5 <= asyncio.get_running_loop().time()
    assert dropped is call
    done.clear()
    assert len(await on.does()) == 3
    (call, at), dropped = done
    assert (at, dropped) == (math.inf, call)


async def test_the_calls_of_a_cancelled_query_end_and_are_not_begun() -> None:
    begun = asyncio.Event()

    async def hangs(_args: Args, asked: ToolRequest) -> ToolResult:
        if asked.query_id == "8-0":
            return ToolResult("another query")
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    on = Worker(hangs)
    running = asyncio.create_task(on.does())
    await begun.wait()
    on.work.cancel("8-0")
    on.cancelled.add("7-0")
    on.work.cancel("7-0")
    # it is not kept: its session may have been deleted
    answered, _told = await running
    assert (answered[0], read(answered)["error"]) == ("XADD", "cancelled")
    assert on.tools.calls == 0
    begun.clear()
    answered, _told = await on.does()
    assert (answered[0], read(answered)["error"], begun.is_set()) == ("XADD", "cancelled", False)
    assert read((await on.does(request(query_id="8-0")))[1])["result"] == "another query"


async def test_a_replica_that_stops_is_not_a_cancelled_query() -> None:
    begun = asyncio.Event()

    async def hangs(_args: Args, _request: ToolRequest) -> ToolResult:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    for cancelled_too in (False, True):
        on = Worker(hangs)
        running = asyncio.create_task(on.does())
        await begun.wait()
        if cancelled_too:
            on.work.cancel("7-0")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert on.tools.calls == 0
        begun.clear()


async def test_a_call_is_broken_off_once_and_for_one_reason() -> None:
    task = asyncio.create_task(asyncio.sleep(600))
    call = _Call("7-0", cast(Any, task))
    call.end("cancelled")
    call.end("too late")
    assert (call.ended, task.cancelling()) == ("cancelled", 1)
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("args", "why"),
    [({}, "missing text argument"), ({"text": ""}, "missing text argument"), ({"text": 5}, "argument text: Input")],
)
async def test_arguments_that_cannot_be_used_are_told_and_nothing_is_run(args: dict[str, Any], why: str) -> None:
    stored, answered, _told = await Worker(never).does(request(args=args))
    assert stored[0] == "SET"
    assert read(answered)["error"].startswith(why)


async def test_null_is_left_out_where_an_argument_may_be_left_out() -> None:
    """Many models say `null` for what they do not use. Where it means something it stays."""

    class Loose(BaseModel):
        text: str
        tone: str = "kind"
        most: int | None = 3

    assert _arguments(Loose, {"text": "x", "tone": None, "most": None}) == Loose(text="x")
    assert _arguments(Loose, {"text": "x", "most": None}) == Loose(text="x", most=None)
    stored, answered, _told = await Worker(never).does(request(args={"text": None}))
    assert (stored[0], read(answered)["error"]) == ("SET", "missing text argument")


async def test_a_tools_own_failure_is_its_result() -> None:
    async def fails(_args: Args, _request: ToolRequest) -> ToolResult:
        raise ToolError("no such page")

    stored, answered, _told = await Worker(fails).does()
    assert (stored[0], read(answered)["error"], read(answered)["data"]) == ("SET", "no such page", None)


async def test_what_json_cannot_carry_is_told() -> None:
    class Model(BaseModel):
        n: int

    async def gives(data: Any) -> dict[str, Any]:
        async def run(_args: Args, _request: ToolRequest) -> ToolResult:
            return ToolResult("text", data)

        return read((await Worker(run).does())[1])

    assert (await gives(2**70))["data"] == 2**70
    assert (await gives(Model(n=3)))["data"] == {"n": 3}
    assert "its result cannot be sent" in (await gives(object()))["error"]


@pytest.mark.parametrize(
    ("size", "internal", "retention", "seconds"),
    [
        (10, False, 86_400, 86_400),
        (70_000, False, 86_400, 3_600),
        (70_000, False, 60, 60),
        (10, True, 86_400, 300),
        (70_000, True, 60, 60),
    ],
)
async def test_large_and_internal_results_are_kept_for_less_and_none_for_longer_than_anything(
    size: int, internal: bool, retention: int, seconds: int
) -> None:
    stored, *_ = await Worker(says("x" * size), internal=internal, retention=retention).does()
    assert stored[-2:] == ("EX", seconds)


async def test_a_call_that_is_given_up_is_answered() -> None:
    on = Worker(never)
    assert on.route.on_dead_letter is not None
    stored, answered, told = await on.route.on_dead_letter(on.delivery(request()), "it killed three workers")
    assert stored == ("SET", STORED, answered[-1], "EX", 86_400)
    assert (read(answered)["error"], told[0]) == ("it killed three workers", "PUBLISH")
    assert (read(answered)["request_id"], read(answered)["duration_ms"]) == (f"{NOW}-5", 0)


async def test_tools_that_were_replaced_stay_open_until_their_last_call_has_ended() -> None:
    tools, closed = Tools(), list[str]()
    tools.stack.callback(closed.append, "closed")
    tools.calls = 2
    closing = asyncio.create_task(tools.close())
    for left in (1, 0):
        await asyncio.sleep(0)
        assert (closed, closing.done()) == ([], False)
        tools.calls = left
    await closing
    assert closed == ["closed"]


@pytest.mark.parametrize("earlier", [[], ["5-0", "6-0"]], ids=str)
async def test_tools_are_announced_when_they_begin_and_again_to_whoever_asks(earlier: list[str]) -> None:
    announced: list[list[str]] = []
    observed: dict[str, tuple[Any, str]] = {}

    async def cancelled(stream: str) -> list[Entry]:
        assert stream == QUERY_CANCEL.stream
        return [(one, [b"payload", orjson.dumps({"query_id": one})]) for one in earlier]

    async def publish(*messages: Outgoing) -> None:
        announced.append([orjson.loads(one.envelope.payload)["function"]["name"] for one in messages])

    def observe(subject: Any, hear: Any, after: str = "") -> None:
        observed[subject.name] = hear, after

    telling: list[Any] = []

    async def told() -> list[list[str]]:
        while telling:
            await telling.pop()()
        return announced

    context = SimpleNamespace(
        bus=SimpleNamespace(range=cancelled, publish=publish),
        observe=observe,
        supervise=lambda _name, work: telling.append(work),
        participant="probe",
        tools=[],
    )
    offered = Offered(cast(Any, context))

    async def run(_args: Args, _request: ToolRequest) -> ToolResult:
        return ToolResult("")

    offered.set([Tool("open", Args, run), Tool("hidden", Args, run, internal=True)])
    assert await told() == []
    await offered.begin()
    assert await told() == [["open"]]
    # what was cancelled before is read once, and what comes after it is heard of
    assert observed[QUERY_CANCEL.name][1] == (earlier[-1] if earlier else START)
    await observed[TOOL_SCHEMA_REQUEST.name][0](None)
    assert await told() == [["open"], ["open"]]


async def test_what_stands_among_cancelled_queries_and_cannot_be_read_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.telemetry.unread._said", {})
    observed: list[tuple[str, str]] = []

    async def cancelled(_stream: str) -> list[Entry]:
        return [("5-0", [b"payload", b"{"]), ("6-0", [b"payload", b'{"query_id":"7-0"}'])]

    on = Worker(never)
    context = SimpleNamespace(
        bus=SimpleNamespace(range=cancelled),
        observe=lambda subject, _hear, after="": observed.append((subject.name, after)),
        supervise=lambda _name, _work: None,
    )
    offered = Offered(cast(Any, context))
    on.work._cancelled = offered._cancelled
    await offered.begin()
    assert observed == [(TOOL_SCHEMA_REQUEST.name, ""), (QUERY_CANCEL.name, "6-0")]
    assert orjson.loads(capsys.readouterr().err)["entry_id"] == "5-0"
    answered, _told = await on.does()
    assert read(answered)["error"] == "cancelled"


class Page(BaseModel):
    """Reads a page.

    Call it for an address.
    """

    url: str = Field(min_length=1, max_length=9, description="Where it is")
    kind: str = Field(default="text", description="As what", json_schema_extra={"enum": ["text", "raw"]})
    parts: list[int] = Field(default=[], title="Which")


async def shows(_args: Page, _request: ToolRequest) -> ToolResult:
    return ToolResult("")


def test_a_tool_is_described_by_its_arguments_as_models_read_them() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "url": {"type": "string", "description": "Where it is"},
            "kind": {"type": "string", "description": "As what", "default": "text", "enum": ["text", "raw"]},
            "parts": {"type": "array", "items": {"type": "integer"}, "default": []},
        },
        "required": ["url"],
    }
    told = ToolFunction(name="read", description="Reads a page. Call it for an address.", parameters=parameters)
    assert Tool("read", Page, shows).schema("reader") == ToolSchema(function=told, participant="reader")
    internal = Tool("read", Page, shows, internal=True, timeout=20.0).schema("reader")
    assert internal == ToolSchema(function=told, participant="reader", internal=True, timeout=20.0)
    changing = Tool("read", Page, shows, read_only=False).schema("reader")
    assert changing == ToolSchema(function=told, participant="reader", read_only=False)
    # as somebody else has described it
    other = ToolFunction(name="other", description="d", parameters={})
    assert Tool("read", Page, shows, function=other).schema("mcp") == ToolSchema(function=other, participant="mcp")

    class Bare(BaseModel):
        pass

    empty = Bare.model_json_schema()
    assert "properties" in empty
    Bare.__doc__ = None
    with pytest.raises(TypeError, match="Bare needs a docstring"):
        Tool("read", Bare, cast(Any, shows)).schema("reader")


def test_a_failure_says_of_which_call_it_is() -> None:
    assert failure(request(), "why", 5, "1-1") == ToolResultMessage(
        query_id="7-0", call_id=CALL, tool="probe", result="[tool error: why]", error="why", duration_ms=5,
        session_id="s", request_id="1-1",
    )  # fmt: skip
    assert failure(request(), "why") == failure(request(), "why", 0, "")


async def test_of_an_argument_that_is_wrong_the_whole_place_is_told() -> None:
    class Nested(BaseModel):
        inner: Args
        parts: list[int] = Field(min_length=1)

    async def told(**args: Any) -> str:
        on = Worker()
        on.work._args = cast(Any, Nested)
        return str(read((await on.does(request(args=args)))[1])["error"])

    good: dict[str, Any] = {"inner": {"text": "x"}, "parts": [1]}
    for wrong, error in (
        ({"inner": {}}, "missing inner.text argument"),
        ({"parts": []}, "missing parts argument"),
        ({"parts": [1, "x"]}, "argument parts.1: Input should be a valid integer"),
    ):
        assert (await told(**{**good, **wrong})).startswith(error)


async def test_whoever_asks_by_an_earlier_name_is_answered_by_the_tool_under_the_calls_own_id() -> None:
    assert _older_names(["probe"]) == []
    works = {work.stream: work for work in _older_names(["probe", "save_topic", "search_memory"])}
    streams = {name: TOOL_REQUEST.for_tool(name) for name in ("recall_memory", "search_memories", "memory_save")}
    assert set(works) == {streams[name].stream for name in streams} | {TOOL_REQUEST.for_tool("memory_recall").stream}
    published: list[Outgoing] = []
    context = SimpleNamespace(bus=SimpleNamespace(publishing=published.append))
    for name, args, tool in (
        ("recall_memory", {"query": "x"}, "search_memory"),
        # a recall with a topic means another tool
        ("recall_memory", {"topic": "x"}, "recall_topic"),
        ("memory_save", {"topic": "x"}, "save_topic"),
    ):
        asked = request(tool=name, args=args)
        delivery = Worker().delivery(asked, deadline=NOW + 5)
        await works[streams[name].stream].route(cast(Any, context)).handler(delivery)
        envelope = published.pop().envelope
        assert envelope.subject == f"tool.request.{tool}"
        assert TOOL_REQUEST.decode(envelope) == replace(asked, tool=tool)
        assert (envelope.correlation_id, envelope.session_id, envelope.deadline) == (f"{NOW}-5", "s", NOW + 5)
        assert (envelope.user_id, envelope.respondent_id, envelope.traceparent) == ("ann", "B", "trace")


async def test_a_tool_that_is_offered_for_the_first_time_is_new_work_and_one_that_goes_is_still_answered() -> None:
    context = SimpleNamespace(participant="probe", bus=Bus(), settings=SimpleNamespace(retention=9), tools=[])
    offered = Offered(cast(Any, context))

    def tool(name: str, says: str, *, internal: bool = False) -> Tool[Args]:
        async def run(_args: Args, _request: ToolRequest) -> ToolResult:
            return ToolResult(says)

        return Tool(name, Args, run, internal=internal)

    (probe, hidden) = offered.set([tool("probe", "one"), tool("hidden", "one", internal=True)])
    assert [work.stream for work in (probe, hidden)] == [STREAM, TOOL_REQUEST.for_tool("hidden").stream]
    assert [(one["function"]["name"], one.get("internal")) for one in context.tools] == [
        ("probe", None),
        ("hidden", True),
    ]
    on = Worker()
    on.bus = cast(Any, context.bus)
    for work, said in ((probe, 3), (hidden, 2)):
        on.route = work.route(cast(Any, context))
        assert len(await on.does()) == said
    # another version of one, a new one, and one less
    (other,) = offered.set([tool("probe", "two"), tool("other", "two")])
    assert other.stream == TOOL_REQUEST.for_tool("other").stream
    assert [one["function"]["name"] for one in context.tools] == ["probe", "other"]
    for work, answer_now in ((probe, "two"), (hidden, "one")):
        on.route = work.route(cast(Any, context))
        assert read((await on.does())[1])["result"] == answer_now


async def test_a_query_that_is_cancelled_ends_its_calls_of_every_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(participant="probe", tools=[])
    offered = Offered(cast(Any, context))

    async def run(_args: Args, _request: ToolRequest) -> ToolResult:
        return ToolResult("")

    ended: list[tuple[str, str]] = []
    for work in offered.set([Tool("probe", Args, run), Tool("other", Args, run)]):
        monkeypatch.setattr(work, "cancel", lambda query_id, name=work.stream: ended.append((name, query_id)))
    await offered._cancel(Message("1-0", Envelope("query.cancel", b""), QueryCancel(query_id="7-0")))
    assert ended == [(TOOL_REQUEST.for_tool(name).stream, "7-0") for name in ("probe", "other")]
    assert "7-0" in offered._cancelled


class Process:
    """What tools are opened on: `done` is what was opened, closed and said, in order."""

    def __init__(self, participant: str = "probe") -> None:
        self.participant = participant
        self.settings = "first"
        self.tools: list[dict[str, Any]] = []
        self.done: list[Any] = []
        self.changed: list[Any] = []
        self.bus = SimpleNamespace(range=self._nothing, publish=self._publish)
        self.names = ["probe"]

    async def _nothing(self, _stream: str) -> list[Entry]:
        return []

    async def _publish(self, *messages: Outgoing) -> None:
        self.done.append(("said", len(messages)))

    def observe(self, subject: Any, _hear: Any, after: str = "") -> None:
        self.done.append((subject.name, after))

    def supervise(self, name: str, work: Any) -> None:
        self.done.append((name, work))

    def on_settings(self, changed: Any) -> None:
        self.changed.append(changed)

    @asynccontextmanager
    async def build(self, settings: Any) -> AsyncIterator[Sequence[Tool[Any]]]:
        async def run(_args: Args, _request: ToolRequest) -> ToolResult:
            return ToolResult(settings)

        self.done.append(f"open {settings}")
        yield [Tool(name, Args, run) for name in self.names]
        self.done.append(f"close {settings}")


async def test_tools_are_built_anew_with_new_settings_and_the_older_ones_closed_when_they_are_done() -> None:
    on = Process()
    begun = [(TOOL_SCHEMA_REQUEST.name, ""), (QUERY_CANCEL.name, START)]
    async with open_tools(cast(Any, on), cast(Any, on.build)) as works:
        assert [work.stream for work in works] == [STREAM]
        (name, announce) = on.done[-1]
        assert on.done == ["open first", *begun, ("announce tools", announce)]
        await announce()
        assert on.done.pop() == ("said", 1)
        on.done.clear()
        (change,) = on.changed
        await change("second")
        ((_, close), (told, _)) = on.done[1:]
        assert on.done == ["open second", ("close tools", close), (name, on.done[-1][1])]
        assert told == "announce tools"
        await close()
        assert on.done.pop() == "close first"
        on.done.clear()
    # those of now close with their process
    assert on.done == ["close second"]


async def test_what_changes_while_tools_are_built_waits_until_they_are() -> None:
    on, built = Process(), asyncio.Event()

    @asynccontextmanager
    async def build(settings: Any) -> AsyncIterator[Sequence[Tool[Any]]]:
        async with on.build(settings) as tools:
            if settings == "first":
                change = asyncio.create_task(on.changed[0]("second"))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not change.done()
                changing.append(change)
                built.set()
            yield tools

    changing: list[asyncio.Task[None]] = []
    async with open_tools(cast(Any, on), cast(Any, build)):
        assert built.is_set()
        await changing[0]
        assert [one for one in on.done if str(one).startswith("open")] == ["open first", "open second"]


@pytest.mark.parametrize(
    ("participant", "names", "fits"),
    [
        ("web_fetch", ["web_fetch"], True),
        ("web_fetch", ["web_search"], False),
        ("web_fetch", ["web_fetch", "more"], False),
        ("memory", ["search_memory", "save_topic"], True),
    ],
)
async def test_a_participant_outside_serves_one_tool_of_its_own_name(
    participant: str, names: list[str], fits: bool
) -> None:
    on = Process(participant)
    on.names = names
    opened = open_tools(cast(Any, on), cast(Any, on.build))
    if fits:
        async with opened as works:
            aliases = 4 if participant == "memory" else 0
            assert len(works) == len(names) + aliases
    else:
        with pytest.raises(TypeError, match="web_fetch must serve one tool"):
            await opened.__aenter__()


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_participant_of_one_tool_is_its_arguments_and_a_function(timeout: float | None) -> None:
    on = Process()
    settings = SimpleNamespace() if timeout is None else SimpleNamespace(timeout=timeout)
    on.settings = cast(Any, settings)
    built: list[Any] = []

    async def run(args: Args) -> ToolResult:
        return ToolResult(f"you said {args.text}")

    @asynccontextmanager
    async def build(given: Any) -> AsyncIterator[Any]:
        built.append(given)
        yield run

    app = tool_service("probe", Args, Settings, build)
    assert (app.participant, app.settings_cls) == ("probe", Settings)
    async with app._build(cast(Any, on)) as works:
        assert built == [settings]
        (told,) = on.tools
        assert (told["function"]["name"], told.get("timeout")) == ("probe", timeout)
        worker = Worker()
        context = SimpleNamespace(bus=worker.bus, participant="probe", settings=SimpleNamespace(retention=60))
        worker.route = works[0].route(cast(Any, context))
        assert read((await worker.does())[1])["result"] == "you said hi"


def test_a_result_is_read_whatever_a_newer_worker_says_beside_it() -> None:
    said = {"query_id": "q", "call_id": "c", "tool": "t", "result": "r", "duration_ms": 1}
    assert TOOL_RESULT.read(orjson.dumps({**said, "newer": True})) == ToolResultMessage(**said)
    with pytest.raises(DecodeError, match="the payload is malformed: query_id: Field required"):
        TOOL_RESULT.read(b"{}")


async def test_a_call_is_watched_by_whoever_wants_to_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[ToolRequest] = []

    async def watched_call(asked: ToolRequest, running: Coroutine[Any, Any, ToolResult]) -> ToolResult:
        watched.append(asked)
        return await running

    monkeypatch.setattr("shared.participant.tool.watched_call", watched_call)
    for wanted in (False, True):
        monkeypatch.setattr("shared.participant.tool.watching", lambda wanted=wanted: wanted)
        assert read((await Worker().does())[1])["result"] == "you said hi"
        assert watched == [request()] * wanted
