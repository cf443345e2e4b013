"""A tool: a pydantic model of its arguments, an async function, and one line that makes it a participant."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from shared.bus import Command, Delivery, Route, Script
from shared.bus.tail import INBOX_LENGTH
from shared.contracts import (
    PREFIX,
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
)
from shared.envelope import Message, now_ms
from shared.errors import DecodeError, ToolError
from shared.participant.service import Context, Service, Subscription, Work, bound, receive
from shared.participant.settings import Settings
from shared.participant.tool_watch import watched_call
from shared.telemetry.logging import get_logger

log = get_logger()

# An internal result is for its requester alone, who waits no longer than this.
_INTERNAL_SECONDS = 300

A = TypeVar("A", bound=BaseModel)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
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
    """

    name: str
    args: type[A]
    run: RunFor[A]
    internal: bool = False

    def schema(self, participant: str) -> ToolSchema:
        return ToolSchema(
            function=ToolFunction(
                name=self.name, description=_described(self.args), parameters=parameters_schema(self.args)
            ),
            participant=participant,
            internal=self.internal or None,
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


def result_key(tool: str, call_id: str) -> str:
    """Where the result of a call is kept; in the hash slot of the tool's request stream."""
    return f"{PREFIX}result:{{{TOOL_REQUEST.stream}.{tool}}}:{call_id}"


def failure(request: ToolRequest, error: str, duration_ms: int = 0) -> ToolResultMessage:
    return ToolResultMessage(
        query_id=request.query_id,
        call_id=request.call_id,
        tool=request.tool,
        result=f"[tool error: {error}]",
        error=error,
        duration_ms=duration_ms,
        session_id=request.session_id,
    )


# Changes the mark of a call whose entry is gone. KEYS: result. ARGV: mark found, new mark, seconds.
# Returns what is there then; a repeat after a lost reply returns the same.
_TAKE_OVER = Script("""
local now = redis.call('GET', KEYS[1])
if now and now ~= ARGV[1] then return now end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
return ARGV[2]
""")


@dataclass(eq=False, slots=True)
class _Call:
    """A call that is running; its limit ends it at the deadline, or when its query is cancelled."""

    query_id: str
    limit: asyncio.Timeout
    cancelled: bool = False


class ToolWork(Generic[A]):
    """The work stream of one tool: each call runs once, however often it is asked for."""

    def __init__(self, name: str, args: type[A], run: RunFor[A], *, internal: bool = False) -> None:
        self._name = name
        self._args = args
        self._run = run
        self._internal = internal
        self._subject = TOOL_REQUEST.for_tool(name)
        self._results = TOOL_RESULT.for_tool(name)
        self._running: set[_Call] = set()

    @property
    def stream(self) -> str:
        return self._subject.stream

    @property
    def _kept(self) -> int:
        """Seconds for which a result is stored."""
        retention: int = self._context.settings.retention
        return min(_INTERNAL_SECONDS, retention) if self._internal else retention

    def route(self, context: Context[Any]) -> Route:
        self._context = context
        return Route(self._handle, self._abandon, delete_finished=True)

    async def cancel(self, query_id: str) -> None:
        """Stops the calls of a cancelled query."""
        for call in self._running:
            if call.query_id == query_id and not call.limit.expired():
                call.cancelled = True
                call.limit.reschedule(asyncio.get_running_loop().time())

    async def _handle(self, delivery: Delivery) -> Sequence[Command]:
        message = receive(self._subject, delivery)
        with bound(message):
            stored = await self._begin(message)
            if stored is None:
                return await self._execute(message)
            return self._answering(message, stored) if stored else ()

    async def _begin(self, message: Message[ToolRequest]) -> bytes | None:
        """None: run it. A stored result: answer with it. Empty: another entry of the same call is being worked on."""
        bus, request = self._context.bus, message.payload
        key, mark = result_key(self._name, request.call_id), f"running:{message.entry_id}"
        ttl = self._kept
        found = await bus.link.call("SET", key, mark, "NX", "GET", "EX", ttl)
        if found is None or found.decode(errors="replace") == mark:
            return None
        if not found.startswith(b"running:"):
            return bytes(found)
        other = found.removeprefix(b"running:").decode()
        if not await bus.finished(self.stream, self._context.participant, other):
            return b""
        # the other entry may have been answered since: only what is still marked as running is taken over
        now = await bus.link.call(*_TAKE_OVER((key,), found, mark, ttl))
        return None if now == mark.encode() else b"" if now.startswith(b"running:") else bytes(now)

    async def _execute(self, message: Message[ToolRequest]) -> Sequence[Command]:
        request, started = message.payload, time.perf_counter()
        try:
            outcome = await watched_call(request, self._bounded(message))
            data = ToolResultMessage(
                query_id=request.query_id,
                call_id=request.call_id,
                tool=request.tool,
                result=outcome.text,
                data=outcome.data,
                duration_ms=_elapsed(started),
                session_id=request.session_id,
            )
        except ToolError as exc:
            data = failure(request, str(exc), _elapsed(started))
        note = log.debug if data.error is None else log.info
        note("tool.completed", tool=self._name, call_id=request.call_id, ms=data.duration_ms, error=data.error)
        return self._answering(message, data.model_dump_json().encode(), store=True)

    async def _bounded(self, message: Message[ToolRequest]) -> ToolResult:
        """Runs the tool inside the query's deadline; a cancelled query stops it."""
        request = message.payload
        try:
            args = self._args.model_validate(request.args)
        except ValidationError as exc:
            raise ToolError(_argument_error(exc)) from exc
        deadline = message.envelope.deadline
        remaining = None if deadline is None else (deadline - now_ms()) / 1000
        if remaining is not None and remaining <= 0:
            raise ToolError("the query's deadline has passed")
        call = _Call(request.query_id, asyncio.timeout(remaining))
        try:
            async with call.limit:
                self._running.add(call)
                return await self._run(args, request)
        except TimeoutError as exc:
            if not call.limit.expired():
                raise
            raise ToolError("cancelled" if call.cancelled else "the query's deadline has passed") from exc
        finally:
            self._running.discard(call)

    def _answering(self, message: Message[ToolRequest], result: bytes, *, store: bool = False) -> list[Command]:
        """Stores the result, answers the requester, tells observers; the acknowledgement follows in the same write."""
        bus, request = self._context.bus, message.payload
        commands: list[Command] = []
        if store:
            key = result_key(self._name, request.call_id)
            commands.append(("SET", key, result, "EX", self._kept))
        if request.reply_to:
            commands.append(
                (
                    *("XADD", request.reply_to, "NOMKSTREAM", "MAXLEN", "~", INBOX_LENGTH, "*"),
                    *("type", "tool.result", "call_id", request.call_id, "payload", result),
                )
            )
        if store and not self._internal:
            headers = {**message.headers(), "correlation_id": request.query_id, "session_id": request.session_id}
            commands.append(bus.publishing(self._results.of_json(result, **headers)))
        return commands

    async def _abandon(self, delivery: Delivery, reason: str) -> Sequence[Command]:
        """A call that is given up is still answered, so that nobody waits for it."""
        message = receive(self._subject, delivery)
        data = failure(message.payload, reason)
        return self._answering(message, data.model_dump_json().encode(), store=True)


def _elapsed(started: float) -> int:
    return round((time.perf_counter() - started) * 1000)


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
            request = message.payload.model_copy(update={"tool": tool})
            # a repeat is harmless: a call runs once, however often it is asked for
            return [TOOL_REQUEST.for_tool(tool).of(request, **message.headers())]

        return Subscription(TOOL_REQUEST.for_tool(name), pass_on)

    return [passing_on(old) for old, current in TOOL_ALIASES.items() if current in names]


BuildTools = Callable[[S], AbstractAsyncContextManager[Sequence[Tool[Any]]]]


class _Generation(Generic[S]):
    """The tools as built from one version of the settings, kept open until their last call has ended."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.runs: dict[str, RunFor[Any]] = {}
        self.calls = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def run(self, name: str, args: Any, request: ToolRequest) -> ToolResult:
        self.calls += 1
        self.idle.clear()
        try:
            return await self.runs[name](args, request)
        finally:
            self.calls -= 1
            if not self.calls:
                self.idle.set()

    async def close(self) -> None:
        await self.idle.wait()
        await self.stack.aclose()


@contextlib.asynccontextmanager
async def open_tools(context: Context[S], build: BuildTools[S]) -> AsyncIterator[Sequence[Work]]:
    """The work of serving several tools, for a participant that may do other work too.

    `build` is entered again when the settings change; it names the same tools each time.
    """
    current: _Generation[S] = _Generation()
    tools = await current.stack.enter_async_context(build(context.settings))
    current.runs = {tool.name: tool.run for tool in tools}

    async def replace(settings: S) -> None:
        nonlocal current
        fresh: _Generation[S] = _Generation()
        fresh.runs = {tool.name: tool.run for tool in await fresh.stack.enter_async_context(build(settings))}
        old, current = current, fresh
        context.background.create_task(old.close())

    def dispatch(name: str) -> RunFor[Any]:
        async def run(args: Any, request: ToolRequest) -> ToolResult:
            return await current.run(name, args, request)

        return run

    works = [ToolWork(tool.name, tool.args, dispatch(tool.name), internal=tool.internal) for tool in tools]
    schemas = [tool.schema(context.participant) for tool in tools]
    context.tools = [schema.model_dump(exclude_none=True) for schema in schemas]

    async def announce(_message: Message[ToolSchemaRequest] | None = None) -> None:
        await context.bus.publish(*(TOOL_SCHEMA.of(schema) for schema in schemas if not schema.internal))

    async def cancel(message: Message[QueryCancel]) -> None:
        for work in works:
            await work.cancel(message.payload.query_id)

    context.on_settings(replace)
    context.observe(TOOL_SCHEMA_REQUEST, announce)
    context.observe(QUERY_CANCEL, cancel)
    await announce()
    try:
        yield [*works, *_older_names([tool.name for tool in tools])]
    finally:
        await current.close()


def tool_service(
    participant: str,
    args: type[A],
    settings_cls: type[S],
    build: Callable[[S], AbstractAsyncContextManager[Run[A]]],
) -> Service[S]:
    """A participant that serves one tool of its own name."""

    @contextlib.asynccontextmanager
    async def single(settings: S) -> AsyncIterator[Sequence[Tool[Any]]]:
        async with build(settings) as run:

            async def run_for(args: A, _request: ToolRequest) -> ToolResult:
                return await run(args)

            yield [Tool(participant, args, run_for)]

    def opened(context: Context[S]) -> AbstractAsyncContextManager[Sequence[Work]]:
        return open_tools(context, single)

    return Service(participant, settings_cls, opened)


def decode_result(data: bytes) -> ToolResultMessage:
    """Raises DecodeError."""
    try:
        return ToolResultMessage.model_validate_json(data, extra="ignore")
    except ValidationError as exc:
        raise DecodeError(f"a malformed tool result: {exc}") from exc
