"""Calling a tool over the bus: one inbox, one reader, a table of futures by call id."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import orjson
from pydantic_core import PydanticSerializationError

from shared.bus import TOGETHER, ConnectionLost, ReplyError
from shared.bus.keys import result_key
from shared.contracts import (
    LONGEST_CALL,
    NOT_RUN,
    TOOL_REQUEST,
    TOOL_RESULT,
    Outgoing,
    ToolRequest,
    ToolResultMessage,
    canonical_tool,
    encode,
)
from shared.envelope import Envelope
from shared.errors import DecodeError, Local2Error, PermanentError, TransientError
from shared.participant.deadlines import Deadlines
from shared.participant.inbox import ignored
from shared.participant.room import LARGE, LargeMessages
from shared.participant.service import Context
from shared.participant.tool import RUNNING
from shared.participant.tool_watch import attributes_of, watched_request, watching
from shared.telemetry.logging import get_logger

log = get_logger()

# After this long without a reply the stored result is looked up: a reply may have gone to an owner that died.
_PATIENCE = 1.0
# A look at the last moment must not keep anybody waiting.
_LAST_LOOK = 1.0
# The worker stops a call this much later than nobody waits for it any more: its last words would say less than ours.
_AFTERWARDS = 0.25
# Seconds between two looks for a worker that is not there.
_BETWEEN = 0.1


# Not frozen, though nothing ever changes one, for the same reason as an envelope.
@dataclass(slots=True)
class Caller:
    """The user and query of a tool call. deadline: in ms since the epoch, by the bus's clock. time_zone: the user's."""

    query_id: str
    session_id: str = ""
    user_id: str = ""
    respondent_id: str = "A"
    deadline: int | None = None
    traceparent: str = ""
    time_zone: str = ""

    def headers(self) -> dict[str, Any]:
        """The envelope fields of a message sent on the caller's behalf."""
        return {
            "correlation_id": self.query_id,
            "session_id": self.session_id,
            "user_id": self.user_id,
            "respondent_id": self.respondent_id,
            "traceparent": self.traceparent,
            "deadline": self.deadline,
        }


@dataclass(eq=False, slots=True)
class _Call:
    """A call without a result yet.

    until: in the loop's time. internal: see `ToolClient.call`. request_id: the newest entry of the request that is
    known to be written. looked_for: while its stored result is being read.
    abandoned: whether the last check found no live worker of the tool.
    """

    tool: str
    call_id: str
    token: bytes
    caller: Caller
    seconds: float
    until: float
    future: asyncio.Future[ToolResultMessage]
    request: Envelope
    internal: bool = False
    request_id: str = ""
    looked_for: bool = False
    abandoned: bool = False

    def settle(self, answer: ToolResultMessage) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def refuse(self, text: str, error: str, seconds: float = 0.0) -> None:
        self.settle(refused(self.tool, self.call_id, self.caller, text, error, seconds, self.request_id))

    def fail(self, exc: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(exc)


class ToolClient:
    def __init__(self, context: Context[Any]) -> None:
        self._context = context
        # a call may be asked for twice at once: by the run that lost a query and by the one that took it over
        self._waiting: dict[str, list[_Call]] = {}
        self._deadlines: Deadlines[_Call] = Deadlines(self._due)
        self._sending: list[_Call] = []
        self._looking: set[asyncio.Task[None]] = set()
        self._large = LargeMessages(context.bus)
        self._loop = asyncio.get_running_loop()
        # whoever counts and traces says so as the participant starts
        self._watching = watching()
        context.on_inbox("tool.result", self._receive)

    async def schemas(self) -> dict[str, dict[str, Any]]:
        """The tools that models may be offered now, by name, in the OpenAI form."""
        return await self._context.registry.tools()

    async def patience(self, name: str, args: dict[str, Any], limit: float | None, usual: float) -> float:
        """Return the seconds to wait for a call.

        limit: the operator's, which replaces the time that the tool announces. None: the announced time, at least
        `usual`.
        """
        if limit is not None:
            return limit
        served = await self._context.registry.served(canonical_tool(name, args)) or {}
        announced = served.get("timeout")
        if not isinstance(announced, int | float) or not usual < announced:
            return usual
        return min(announced, LONGEST_CALL)

    async def back(self, name: str, args: dict[str, Any], seconds: float) -> None:
        """Waits, for so many seconds at most, for a worker of a tool that there was when a call was asked for: in a
        stack that starts, whoever takes a query over may be there before the tools are."""
        tool, registry = canonical_tool(name, args), self._context.registry
        until = self._loop.time() + seconds
        while self._loop.time() < until and await registry.served(tool) is None and await registry.known(tool):
            await asyncio.sleep(_BETWEEN)

    def call(
        self,
        name: str,
        args: dict[str, Any],
        *,
        call_id: str,
        caller: Caller,
        timeout: float,
        grace: float = 0.0,
        attempt: int | None = None,
        token: str = "",
        internal: bool = False,
    ) -> Coroutine[Any, Any, ToolResultMessage]:
        """The tool's result; every failure is a result too, with a text for the model. What changes something is not
        run for the second respondent, which is offered it all the same: what all requests begin with lies in the model
        server's cache. Raises TooMuchUnderWay and BusNearlyFull for large arguments that Redis has no room for.

        timeout: seconds.
        grace: seconds more for an answer that says itself what took so long. What is left until the caller's deadline
        bounds both further.
        attempt: 1 says that this call id was never asked for before, which saves its worker a look; None: unknown.
        token: what proves that an answer comes from the tool's worker, where the call was asked for before; else a new
        one is made.
        internal: an operation that is meant for participants; models and users cannot name one.
        """
        tool = canonical_tool(name, args)
        token = token or new_token()
        if not self._watching:
            return self._call(name, tool, args, call_id, timeout, grace, attempt, token, internal, caller)
        send = partial(self._call, name, tool, args, call_id, timeout, grace, attempt, token, internal)
        attributes = attributes_of(tool, call_id, caller.query_id, caller.session_id)
        return watched_request(
            attributes, caller.traceparent, lambda traceparent: send(replace(caller, traceparent=traceparent))
        )

    async def _call(
        self,
        name: str,
        tool: str,
        args: dict[str, Any],
        call_id: str,
        timeout: float,
        grace: float,
        attempt: int | None,
        token: str,
        internal: bool,
        caller: Caller,
    ) -> ToolResultMessage:
        bus, registry = self._context.bus, self._context.registry
        # since when it is known that nobody has asked before
        asked = now = bus.now_ms()
        served = registry.cached(tool)
        if served is None:
            served, now = await registry.served(tool), bus.now_ms()
        if served is None or bool(served.get("internal")) is not internal:
            if served is None and await registry.known(tool):
                return refused(tool, call_id, caller, "[tool unavailable]", "tool unavailable")
            return refused(tool, call_id, caller, f"[unknown tool: '{name}']", f"unknown tool: '{name}'")
        if caller.respondent_id != "A" and served.get("read_only") is False:
            return refused(tool, call_id, caller, f"[{NOT_RUN}]", NOT_RUN)
        if registry.overloaded(tool):
            text = f"too many calls of {tool} wait for its worker; try again later"
            return refused(tool, call_id, caller, f"[tool error: {text}]", text)
        payload = {
            "query_id": caller.query_id,
            "call_id": call_id,
            "tool": tool,
            "args": args,
            "session_id": caller.session_id,
            "user_id": caller.user_id,
            "reply_to": self._context.inbox,
            "token": token,
            "time_zone": caller.time_zone,
        }
        try:
            data = _encoded(payload)
        except PydanticSerializationError as exc:
            text = f"the arguments cannot be sent: {exc}"
            return refused(tool, call_id, caller, f"[tool error: {exc}]", text)
        if large := len(data) > LARGE:
            await self._large.admit(caller.user_id, call_id, len(data))
        if caller.deadline is not None and (left := bus.left(caller.deadline, caller.query_id)) < timeout + grace:
            # behind it nobody waits for anything, and the tool would run on for nothing
            timeout = min(timeout, max(0.0, left))
            grace = max(0.0, left - timeout)
        seconds = timeout + grace
        deadline = now + int((seconds + _AFTERWARDS) * 1000)
        # by their places: names would cost nearly as much again
        envelope = Envelope(
            _subject(tool), data, "", "", asked, caller.query_id, "", caller.session_id, caller.user_id,
            caller.respondent_id, caller.traceparent, deadline, attempt,
        )  # fmt: skip
        began = self._loop.time()
        until = began + seconds
        call = _Call(
            tool, call_id, token.encode(), caller, timeout, until, self._loop.create_future(), envelope, internal
        )
        calls = self._waiting.setdefault(call_id, [])
        calls.append(call)
        # what is asked in one loop tick leaves together
        if not self._sending:
            self._loop.call_soon(self._flush)
        self._sending.append(call)
        if len(self._sending) == TOGETHER:
            self._flush()
        self._deadlines.add(call, until if seconds < _PATIENCE else began + _PATIENCE)
        try:
            answer = await call.future
            if internal:
                # nobody asks for it again, and it may be full of what somebody is about to delete
                with suppress(TransientError):
                    await bus.link.call("UNLINK", result_key(tool, call_id))
            return answer
        finally:
            if large:
                self._large.ended(caller.user_id, call_id)
            self._deadlines.drop(call)
            calls.remove(call)
            if not calls:
                del self._waiting[call_id]

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self) -> None:
        asked = [call for call in self._sending if not call.future.done()]
        self._sending = []
        if asked:
            # not repeated by the connection: a request that may be there already says that it is asked for again
            self._post(asked, retry=False)

    def _post(self, asked: Sequence[_Call], *, retry: bool) -> None:
        bus = self._context.bus
        writing = bus.link.commit([bus.publishing(Outgoing(call.request)) for call in asked], retry=retry)
        writing.add_done_callback(partial(self._written, asked))

    def _written(self, asked: Sequence[_Call], writing: asyncio.Future[list[Any]]) -> None:
        if writing.cancelled():
            return
        error = writing.exception()
        if isinstance(error, ConnectionLost) or (error is not None and len(asked) > 1):
            for call in asked:
                if not call.future.done():
                    call.request = replace(call.request, attempt=None)
                    # each by itself: one that cannot be sent, or is refused, takes no other along
                    self._post([call], retry=True)
        elif isinstance(error, PermanentError):
            for call in asked:
                call.refuse(f"[tool error: {error}]", str(error))
        elif error is not None:
            for call in asked:
                call.fail(error)
        else:
            for call, reply in zip(asked, writing.result(), strict=True):
                if isinstance(reply, ReplyError):
                    call.fail(reply)
                else:
                    call.request_id = reply.decode()

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self, call: _Call) -> None:
        """A reply may have gone to an owner that died, or got lost: after a while the stored result is looked for."""
        if call.future.done() or call.looked_for:
            return
        call.looked_for = True
        looking = asyncio.create_task(self._look(call))
        self._looking.add(looking)
        looking.add_done_callback(partial(self._looked, call))

    def _looked(self, call: _Call, looking: asyncio.Task[None]) -> None:
        self._looking.discard(looking)
        call.looked_for = False
        if not looking.cancelled() and (error := looking.exception()) is not None:
            # a bug: whoever waits is told, instead of waiting for ever
            call.fail(error)

    async def _look(self, call: _Call) -> None:
        now = self._loop.time()
        last = now >= call.until
        try:
            async with asyncio.timeout_at(now + _LAST_LOOK if last else call.until):
                stored = await self._context.bus.link.call("GET", result_key(call.tool, call.call_id))
            if stored is not None and not stored.startswith(RUNNING):
                call.settle(TOOL_RESULT.read(stored))
            elif call.internal and not last and await self._is_abandoned(call):
                call.refuse("[tool unavailable]", "tool unavailable", now - (call.until - call.seconds))
        except (Local2Error, TimeoutError) as exc:
            log.warning("tool.result_not_found", call_id=call.call_id, reason=str(exc))
        if last:
            text = f"tool timeout after {call.seconds:g}s"
            call.refuse(f"[{text}]", text, call.seconds)
        elif not call.future.done():
            # one look at a time: while Redis is away they would pile up
            self._deadlines.add(call, min(call.until, self._loop.time() + _PATIENCE))

    async def _is_abandoned(self, call: _Call) -> bool:
        """Return whether two checks in a row found no live worker of the tool: a restarted worker may take the call."""
        before, call.abandoned = call.abandoned, not await self._context.registry.has_worker(call.tool)
        return before and call.abandoned

    def _receive(self, _entry_id: str, raw: Mapping[bytes, bytes]) -> None:
        calls = self._waiting.get(raw.get(b"call_id", b"").decode(errors="replace"))
        if not calls:
            ignored("late")
            return
        token = raw.get(b"token", b"")
        asked = [call for call in calls if secrets.compare_digest(call.token, token)]
        if not asked:
            # anybody who answers anything may write here
            ignored("token")
            return
        if b"payload" not in raw:
            # it is large: it is read where its worker has stored it
            for call in asked:
                self._due(call)
            return
        try:
            answer = TOOL_RESULT.read(raw[b"payload"])
        except DecodeError as exc:
            ignored("malformed")
            log.warning("tool.malformed_result", reason=str(exc))
            return
        for call in asked:
            call.settle(answer)


def new_token() -> str:
    """What only the worker of a call will know beside its caller: 128 random bits."""
    return os.urandom(16).hex()


@lru_cache(maxsize=256)
def _subject(tool: str) -> str:
    return TOOL_REQUEST.for_tool(tool).name


def _encoded(request: dict[str, Any]) -> bytes:
    """A ToolRequest as JSON. Raises PydanticSerializationError for arguments that JSON cannot carry."""
    try:
        return orjson.dumps(request)
    except TypeError:
        # what orjson does not know, like integers of more than 64 bits
        return encode(ToolRequest(**request))


def refused(
    tool: str, call_id: str, caller: Caller, text: str, error: str, seconds: float = 0.0, request_id: str = ""
) -> ToolResultMessage:
    """Return the result of a call that no worker has answered. text: for the model; error: for programs."""
    return ToolResultMessage(
        query_id=caller.query_id,
        call_id=call_id,
        tool=tool,
        result=text,
        error=error,
        duration_ms=round(seconds * 1000),
        session_id=caller.session_id,
        request_id=request_id,
    )
