"""A tool: a pydantic model of its arguments, an async function, and one line that makes it a participant."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from shared.bus import START, Command, Delivery, Entry, Route
from shared.bus.keys import result_key
from shared.bus.scripts import FIND_BY_TEXT
from shared.contracts import (
    QUERY_CANCEL,
    TOOL_ALIASES,
    TOOL_REQUEST,
    TOOL_RESULT,
    TOOL_SCHEMA,
    TOOL_SCHEMA_REQUEST,
    Outgoing,
    QueryCancel,
    ToolFunction,
    ToolRequest,
    ToolResultMessage,
    ToolSchema,
    ToolSchemaRequest,
    canonical_tool,
    encode,
)
from shared.envelope import Envelope, Message
from shared.errors import DecodeError, ToolError
from shared.participant.deadlines import Deadlines
from shared.participant.inbox import inbox_bound
from shared.participant.registry import may_serve
from shared.participant.service import Context, Service, Subscription, Work, receive
from shared.participant.settings import Settings
from shared.participant.tool_watch import watched_call, watching
from shared.telemetry.logging import bind_ids, get_logger
from shared.telemetry.unread import not_understood

log = get_logger()

# An internal result is for its requester alone, who waits no longer than this.
_INTERNAL_SECONDS = 300
# A large result (in bytes) is kept as long as its query may ask for it again, and then some.
_LARGE = 65_536
_LARGE_SECONDS = 3_600
_TOO_LATE = "the query's deadline has passed"
# Entries of a work stream that are looked at in one go for an earlier request of the same call.
_LOOKED_AT = 200
# The prefix of an internal operation's error when the operation may have written data.
OUTCOME_UNKNOWN = "outcome unknown: "
# Where a result will be: until when (ms, by the bus's clock) it is waited for.
RUNNING = b"running:"
# A first request that needed longer (ms) to come here was held up, and may have been asked for again meanwhile.
_AT_ONCE = 1_000

# Seconds between two looks whether the last call of tools that were replaced has ended.
_GLANCE = 0.05

A = TypeVar("A", bound=BaseModel)
S = TypeVar("S", bound=Settings)


@dataclass(slots=True)
class ToolResult:
    """`text` is read by the model; `data` is structured, for clients. A failure is raised as ToolError instead."""

    text: str
    data: Any = None


# Of a participant that serves one tool: the arguments are all that it looks at.
Run = Callable[[A], Awaitable[ToolResult]]
# Of a tool whose answer depends on who asks.
RunFor = Callable[[A, ToolRequest], Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True)
class Tool(Generic[A]):
    """A named tool. The docstring of `args` says what it does and when to call it, its fields describe arguments.

    internal: an operation for other participants. No model is offered it, no observer sees its results, and a
    result is kept only as long as its requester may still look for it.
    function: as models are told of it, where that is not made from `args`.
    timeout: seconds after which the tool itself ends a call; callers wait that long.
    read_only: it changes nothing; else it is not run for the second respondent, whose answer nobody sees.
    """

    name: str
    args: type[A]
    run: RunFor[A]
    internal: bool = False
    function: ToolFunction | None = None
    timeout: float | None = None
    read_only: bool = True

    def schema(self, participant: str) -> ToolSchema:
        return ToolSchema(
            function=self.function
            or ToolFunction(name=self.name, description=_described(self.args), parameters=parameters_schema(self.args)),
            participant=participant,
            internal=self.internal or None,
            timeout=self.timeout,
            read_only=None if self.read_only else False,
        )


def _described(args: type[BaseModel]) -> str:
    if not args.__doc__:
        raise TypeError(f"{args.__name__} needs a docstring: the model reads it to know when to call the tool")
    return " ".join(args.__doc__.split())


def parameters_schema(args: type[BaseModel]) -> dict[str, Any]:
    """The arguments as the flat JSON schema that models read best: no titles, no limits they cannot follow."""
    schema = args.model_json_schema()
    properties = {
        name: {key: value for key, value in part.items() if key in ("type", "description", "enum", "items", "default")}
        for name, part in schema.get("properties", {}).items()
    }
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def failure(request: ToolRequest, error: str, duration_ms: int = 0, request_id: str = "") -> ToolResultMessage:
    return ToolResultMessage(
        query_id=request.query_id,
        call_id=request.call_id,
        tool=request.tool,
        result=f"[tool error: {error}]",
        error=error,
        duration_ms=duration_ms,
        session_id=request.session_id,
        request_id=request_id,
    )


class NotRun(ToolError):
    """The call was not begun. That is no result of it: whoever asks again may have it run."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call that is running. `ended`: why it was broken off, at its deadline or because its query was cancelled."""

    query_id: str
    task: asyncio.Task[Any]
    ended: str = ""

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            self.task.cancel()


class Cancelled(dict[str, None]):
    """The queries that were cancelled lately: their calls that still wait in a queue are not begun."""

    def add(self, query_id: str) -> None:
        self[query_id] = None
        if len(self) > QUERY_CANCEL.keep:
            del self[next(iter(self))]


class Tools:
    """Tools as built from one version of the settings, kept open until their last call has ended.

    calls: those that are running.
    """

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.runs: dict[str, RunFor[Any]] = {}
        self.calls = 0

    async def close(self) -> None:
        while self.calls:
            await asyncio.sleep(_GLANCE)
        await self.stack.aclose()


class ToolWork(Generic[A]):
    """The work stream of one tool: each call runs once, however often it is asked for.

    Whoever asks again says so (`attempt`), and so does Redis (`deliveries`); only then, and when a request was long on
    its way, is it looked up whether there is a result, or another entry of the same call that is not finished.
    """

    def __init__(
        self, name: str, args: type[A], current: Callable[[], Tools], cancelled: Cancelled, *, internal: bool
    ) -> None:
        self._name = name
        self._args = args
        self._current = current
        self._cancelled = cancelled
        self._internal = internal
        self._subject = TOOL_REQUEST.for_tool(name)
        self._results = TOOL_RESULT.for_tool(name)
        # followed by the call's id
        self._stored_under = result_key(name, "")

    @property
    def stream(self) -> str:
        return self._subject.stream

    def route(self, context: Context[Any]) -> Route:
        self._context = context
        self._loop = asyncio.get_running_loop()
        # whoever counts and traces says so as the participant starts
        self._watching = watching()
        # seconds for which a result is stored, unless it is large
        retention: int = context.settings.retention
        self._kept = min(_INTERNAL_SECONDS, retention) if self._internal else retention
        # the calls that are running, until when
        self._running: Deadlines[_Call] = Deadlines(lambda call: call.end(_TOO_LATE))
        return Route(self._handle, self._abandon)

    def cancel(self, query_id: str) -> None:
        """Stops the calls of a cancelled query."""
        for call in self._running:
            if call.query_id == query_id:
                call.end("cancelled")

    async def _handle(self, delivery: Delivery) -> Sequence[Command]:
        message = receive(self._subject, delivery)
        bind_ids(message.envelope.ids())
        if not _first(message) and (known := await self._known(message)) is not None:
            return known
        request, started, run = message.payload, self._loop.time(), True
        try:
            running = self._bounded(message)
            outcome = await (watched_call(request, running) if self._watching else running)
            ms = round((self._loop.time() - started) * 1000)
            result = _encoded(message, outcome, ms)
            log.debug("tool.completed", tool=self._name, call_id=request.call_id, ms=ms)
        except ToolError as exc:
            run = not isinstance(exc, NotRun)
            ms = round((self._loop.time() - started) * 1000)
            data = failure(request, str(exc), ms, message.entry_id)
            result = encode(data)
            log.info("tool.failed", tool=self._name, call_id=request.call_id, ms=ms, error=data.error)
        # nobody asks again for what a cancelled query called, and its session may have been deleted meanwhile
        store = run and request.query_id not in self._cancelled
        return self._answering(message, result, new=True, store=store)

    async def _known(self, message: Message[ToolRequest]) -> Sequence[Command] | None:
        """What a call that may have been asked for before comes to without being run; None when it has to be."""
        if await self._asked_before(message):
            return self._leaving_it(message)
        stored = await self._context.bus.link.call("GET", self._stored_under + message.payload.call_id)
        return None if stored is None or stored.startswith(RUNNING) else self._answering(message, stored)

    def _leaving_it(self, message: Message[ToolRequest]) -> list[Command]:
        """The earlier entry is answered for this one too. It is told where the result will be until when that is waited
        for, because its own deadline may pass before it is begun."""
        deadline = message.envelope.deadline
        # whoever asks stamps both by the clock of the bus as far as he has heard of it
        if deadline is None or (left := self._context.bus.left(deadline, message.envelope.time)) <= 0:
            return []
        key, ms = self._stored_under + message.payload.call_id, math.ceil(left * 1000)
        return [("SET", key, RUNNING + str(self._context.bus.now_ms() + ms).encode(), "NX", "PX", ms)]

    async def _left_to_it(self, message: Message[ToolRequest]) -> float:
        """Seconds until the deadline of a later request which was left to this one; 0 when there is none."""
        bus = self._context.bus
        stored = await bus.link.call("GET", self._stored_under + message.payload.call_id)
        until = stored.removeprefix(RUNNING) if stored is not None else b""
        return (int(until) - bus.now_ms()) / 1000 if until.isdigit() else 0.0

    async def _asked_before(self, message: Message[ToolRequest]) -> bool:
        """Whether an earlier entry of the same call is not finished."""
        bus, request = self._context.bus, message.payload
        after = "-"
        while after:
            found = await bus.link.call(
                *FIND_BY_TEXT((self.stream,), after, message.entry_id, request.call_id, _LOOKED_AT)
            )
            after = found[0].decode()
            for entry_id in found[1:]:
                for entry in await bus.range(self.stream, entry_id.decode(), entry_id.decode()):
                    same = self._same_call(entry, request)
                    if same and not await bus.finished(self.stream, self._context.participant, entry[0]):
                        return True
        return False

    def _same_call(self, entry: Entry, request: ToolRequest) -> bool:
        try:
            other = self._subject.decode(Envelope.parse(self._subject.name, *entry))
        except DecodeError:
            return False
        return other.call_id == request.call_id

    async def _bounded(self, message: Message[ToolRequest]) -> ToolResult:
        """Runs the tool inside the call's deadline; a cancelled query stops it."""
        # a task that begins at once is not known to its delivery yet
        request, task = message.payload, asyncio.current_task(self._loop)
        assert task is not None
        if request.query_id in self._cancelled:
            raise NotRun("cancelled")
        try:
            args = _arguments(self._args, request.args)
        except ValidationError as exc:
            raise ToolError(_argument_error(exc)) from exc
        deadline, remaining = message.envelope.deadline, math.inf
        if deadline is not None and (remaining := self._context.bus.left(deadline, message.envelope.time)) <= 0:
            remaining = await self._left_to_it(message)
            if remaining <= 0:
                raise NotRun(_TOO_LATE)
        call, tools = _Call(request.query_id, task), self._current()
        self._running.add(call, self._loop.time() + remaining)
        tools.calls += 1
        try:
            return await tools.runs[self._name](args, request)
        except asyncio.CancelledError as exc:
            # somebody else may have cancelled it too: the replica that stops, or that has lost the entry
            if not call.ended or task.uncancel():
                raise
            raise ToolError(call.ended) from exc
        finally:
            self._running.drop(call)
            tools.calls -= 1

    def _answering(
        self, message: Message[ToolRequest], result: bytes, *, new: bool = False, store: bool = False
    ) -> list[Command]:
        """Stores the result, answers the requester, tells observers; the acknowledgement follows in the same write."""
        bus, request, envelope = self._context.bus, message.payload, message.envelope
        commands: list[Command] = []
        if store:
            seconds = self._kept if len(result) <= _LARGE else min(_LARGE_SECONDS, self._kept)
            commands.append(("SET", self._stored_under + request.call_id, result, "EX", seconds))
        if request.reply_to:
            # a large one is read where it is stored: all else in the inbox, and every cancel, would wait behind it
            said = ("payload", result) if len(result) <= _LARGE else ()
            bound = inbox_bound(len(result) if said else 0)
            known = ("*", "type", "tool.result", "call_id", request.call_id, "token", request.token)
            commands.append(("XADD", request.reply_to, "NOMKSTREAM", *bound, *known, *said))
        if new and not self._internal:
            # nobody looks at the request's envelope any more: it goes on with the result
            envelope.subject, envelope.payload, envelope.time = self._results.name, result, bus.now_ms()
            envelope.correlation_id, envelope.session_id = request.query_id, request.session_id
            envelope.causation_id, envelope.deadline, envelope.attempt = envelope.id, None, None
            commands.append(bus.publishing(Outgoing(envelope)))
        return commands

    async def _abandon(self, delivery: Delivery, reason: str) -> Sequence[Command]:
        """A call that is given up is still answered, so that nobody waits for it."""
        message = receive(self._subject, delivery)
        result = encode(failure(message.payload, reason, request_id=message.entry_id))
        return self._answering(message, result, new=True, store=True)


def _first(message: Message[ToolRequest]) -> bool:
    """Whether nobody can have asked for the call before."""
    envelope = message.envelope
    if message.deliveries != 1 or envelope.attempt != 1:
        return False
    return abs(int(message.entry_id.partition("-")[0]) - envelope.time) < _AT_ONCE


def _encoded(message: Message[ToolRequest], outcome: ToolResult, ms: int) -> bytes:
    """A ToolResultMessage as JSON. Raises ToolError for data that JSON cannot carry."""
    request = message.payload
    result = {
        "query_id": request.query_id,
        "call_id": request.call_id,
        "tool": request.tool,
        "result": outcome.text,
        "error": None,
        "data": outcome.data,
        "duration_ms": ms,
        "session_id": request.session_id,
        "request_id": message.entry_id,
    }
    try:
        return orjson.dumps(result)
    except TypeError:
        # what orjson does not know, like models or integers of more than 64 bits
        pass
    try:
        return encode(ToolResultMessage(**result))
    except ValueError as exc:
        raise ToolError(f"its result cannot be sent: {exc}") from exc


def _arguments(kind: type[A], given: Mapping[str, Any]) -> A:
    """Raises ValidationError. What may be left out may be null as well: many models say so what they leave out."""
    validated: Callable[[Mapping[str, Any]], A] = kind.__pydantic_validator__.validate_python
    try:
        return validated(given)
    except ValidationError:
        said = {name: value for name, value in given.items() if value is not None}
        if len(said) == len(given):
            raise
    return validated(said)


def _argument_error(exc: ValidationError) -> str:
    """A missing or empty required argument by name; anything else as the validator says it."""
    first = exc.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("missing", "string_too_short", "too_short"):
        return f"missing {name} argument"
    return f"argument {name}: {first['msg']}"


def _older_names(names: Sequence[str]) -> list[Work]:
    """Whoever asks a tool by a name that it had earlier is answered by the tool itself, under the call's own id."""

    def passing_on(name: str) -> Subscription[ToolRequest]:
        async def pass_on(message: Message[ToolRequest]) -> list[Outgoing]:
            tool = canonical_tool(name, message.payload.args)
            request = replace(message.payload, tool=tool)
            # a repeat is harmless: a call runs once, however often it is asked for
            return [TOOL_REQUEST.for_tool(tool).of(request, **message.headers())]

        return Subscription(TOOL_REQUEST.for_tool(name), pass_on)

    return [passing_on(old) for old, current in TOOL_ALIASES.items() if current in names]


class Offered:
    """The tools that a replica offers, and the calls of them that are running.

    current: as built from one version of the settings.
    """

    def __init__(self, context: Context[Any]) -> None:
        self.current = Tools()
        self._context = context
        self._cancelled = Cancelled()
        self._works: dict[str, ToolWork[Any]] = {}
        self._schemas: list[ToolSchema] = []

    def set(self, tools: Sequence[Tool[Any]]) -> list[ToolWork[Any]]:
        """These are offered from now on, and no others; returns the work of those that come for the first time.

        A tool that goes keeps its work: calls of it that are on their way are answered by how it ran last.
        """
        self.current.runs.update((tool.name, tool.run) for tool in tools)
        new = {
            tool.name: ToolWork(tool.name, tool.args, lambda: self.current, self._cancelled, internal=tool.internal)
            for tool in tools
            if tool.name not in self._works
        }
        self._works.update(new)
        self._schemas = [tool.schema(self._context.participant) for tool in tools]
        self._context.tools = [schema.model_dump(exclude_none=True) for schema in self._schemas]
        return list(new.values())

    async def begin(self) -> None:
        """Announces the tools, now and whenever somebody asks, and hears of queries that are cancelled."""
        self._context.observe(TOOL_SCHEMA_REQUEST, self._asked)
        # the calls of a query that was cancelled before this replica came may wait in the queue
        earlier = await self._context.bus.range(QUERY_CANCEL.stream)
        for entry in earlier:
            try:
                self._cancelled.add(QUERY_CANCEL.decode(Envelope.parse(QUERY_CANCEL.name, *entry)).query_id)
            except DecodeError as exc:
                not_understood(QUERY_CANCEL.stream, entry[0], str(exc))
        self._context.observe(QUERY_CANCEL, self._cancel, after=earlier[-1][0] if earlier else START)
        self.announce()

    def announce(self) -> None:
        """Says which tools there are, on `tool.schema`, as soon as Redis takes it: nobody waits for that."""
        self._context.supervise("announce tools", self._announce)

    async def _announce(self) -> None:
        schemas = [schema for schema in self._schemas if not schema.internal]
        await self._context.bus.publish(*(TOOL_SCHEMA.of(schema) for schema in schemas))

    async def _asked(self, _message: Message[ToolSchemaRequest]) -> None:
        self.announce()

    async def _cancel(self, message: Message[QueryCancel]) -> None:
        self._cancelled.add(message.payload.query_id)
        for work in self._works.values():
            work.cancel(message.payload.query_id)


BuildTools = Callable[[S], AbstractAsyncContextManager[Sequence[Tool[Any]]]]


@contextlib.asynccontextmanager
async def open_tools(context: Context[S], build: BuildTools[S]) -> AsyncIterator[Sequence[Work]]:
    """The work of serving several tools, for a participant that may do other work too.

    `build` is entered again when the settings change; it names the same tools each time.
    """
    offered = Offered(context)
    # what changes while the tools are built is heard, and waits until they are
    one_at_a_time = asyncio.Lock()

    async def replace(settings: S) -> None:
        async with one_at_a_time:
            fresh = Tools()
            tools = await fresh.stack.enter_async_context(build(settings))
            old, offered.current = offered.current, fresh
            offered.set(tools)
        context.supervise("close tools", old.close)
        offered.announce()

    context.on_settings(replace)
    async with one_at_a_time:
        tools = await offered.current.stack.enter_async_context(build(context.settings))
        works = offered.set(tools)
    if not all(may_serve(context.participant, tool.name) for tool in tools):
        raise TypeError(f"{context.participant} must serve one tool, named like itself: others are never offered")
    await offered.begin()
    try:
        yield [*works, *_older_names([tool.name for tool in tools])]
    finally:
        await offered.current.close()


def tool_service(
    participant: str,
    args: type[A],
    settings_cls: type[S],
    build: Callable[[S], AbstractAsyncContextManager[Run[A]]],
    *,
    read_only: bool = True,
) -> Service[S]:
    """A participant that serves one tool of its own name. A setting `timeout` is how long a call may take, in seconds:
    `build` sees to that, and callers are told. read_only: see Tool."""

    @contextlib.asynccontextmanager
    async def single(settings: S) -> AsyncIterator[Sequence[Tool[Any]]]:
        async with build(settings) as run:
            timeout = getattr(settings, "timeout", None)
            yield [Tool(participant, args, lambda args, _request: run(args), timeout=timeout, read_only=read_only)]

    def opened(context: Context[S]) -> AbstractAsyncContextManager[Sequence[Work]]:
        return open_tools(context, single)

    return Service(participant, settings_cls, opened)
