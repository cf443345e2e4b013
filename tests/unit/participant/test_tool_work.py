"""What a tool's worker does with each request: what it looks up, what it writes, and what it never does twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from pydantic import BaseModel, Field

from shared.bus import START, Command, Delivery, Entry
from shared.bus.keys import result_key
from shared.bus.slots import Slots
from shared.contracts import QUERY_CANCEL, TOOL_REQUEST, TOOL_SCHEMA_REQUEST, Outgoing, ToolRequest, encode
from shared.errors import ToolError
from shared.participant.inbox import inbox_bound
from shared.participant.tool import RUNNING, Cancelled, Offered, Tool, ToolResult, Tools, ToolWork, _arguments, _Call

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


async def echo(args: Args, _request: ToolRequest) -> ToolResult:
    return ToolResult(f"you said {args.text}", {"n": 1})


def request(**values: Any) -> ToolRequest:
    said = {"query_id": "7-0", "call_id": CALL, "tool": "probe", "args": {"text": "hi"}, "session_id": "s"}
    return ToolRequest.model_validate({**said, "user_id": "ann", "reply_to": "inbox", "token": "secret", **values})


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

        return Delivery(STREAM, f"{NOW}-5", fields, deliveries, Slots(1, {STREAM: None}, 3, unblock))

    async def does(self, asked: ToolRequest | None = None, deliveries: int = 1, **how: Any) -> list[Command]:
        delivery = self.delivery(asked or request(), deliveries, **how)
        delivery.task = cast("asyncio.Task[None]", asyncio.current_task())
        return list(await self.route.handler(delivery))


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
    for size, there in ((60_000, True), (70_000, False)):

        async def run(_args: Args, _request: ToolRequest, size: int = size) -> ToolResult:
            return ToolResult("x" * size)

        stored, answered, _told = await Worker(run).does()
        assert len(stored[2]) > size
        said = answered[answered.index("type") :]
        assert said == ("type", "tool.result", "call_id", CALL, "token", "secret", *(("payload", stored[2]) * there))


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
    assert [command[0] for command in on.bus.asked] == (["EVALSHA", "GET"] if looked_up else [])
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
    for nothing_to_wait_for in ({}, {"deadline": NOW}):
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
    for deadline, later in ((NOW + 100, None), (NOW - 5, NOW + 100)):
        on = Worker(hangs)
        if later:
            on.bus.stored[STORED] = RUNNING + str(later).encode()
        async with asyncio.timeout(30):
            stored, answered, _told = await on.does(deadline=deadline)
        assert stored[0] == "SET"
        assert read(answered)["error"] == "the query's deadline has passed"
        assert on.tools.calls == 0


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
    async def run(_args: Args, _request: ToolRequest) -> ToolResult:
        return ToolResult("x" * size)

    stored, *_ = await Worker(run, internal=internal, retention=retention).does()
    assert stored[-2:] == ("EX", seconds)


async def test_a_call_that_is_given_up_is_answered() -> None:
    on = Worker(never)
    assert on.route.undertaker is not None
    stored, answered, told = await on.route.undertaker(on.delivery(request()), "it killed three workers")
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
        tools.ended()
        assert tools.calls == left
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
        keep_up=lambda _name, work: telling.append(work),
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
