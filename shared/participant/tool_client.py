"""Calling a tool over the bus: one inbox, one reader, a table of futures by call id."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic_core import PydanticSerializationError

from shared.bus import ConnectionLost, with_header
from shared.bus.keys import result_key
from shared.bus.port import checked
from shared.contracts import TOOL_REQUEST, Outgoing, ToolRequest, ToolResultMessage, canonical_tool
from shared.errors import DecodeError, Local2Error, PermanentError
from shared.participant.deadlines import Deadlines
from shared.participant.inbox import ignored
from shared.participant.service import Context
from shared.participant.tool import RUNNING, decode_result
from shared.participant.tool_watch import watched_request, watching
from shared.telemetry.logging import get_logger

log = get_logger()

# After this long without a reply the stored result is looked up: a reply may have gone to an owner that died.
_PATIENCE = 1.0
# A look at the last moment must not keep anybody waiting.
_LAST_LOOK = 1.0
# The worker stops a call this much later than nobody waits for it any more: its last words would say less than ours.
_AFTERWARDS = 0.25


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a tool is called. `deadline` is in ms since the epoch, by the bus's clock."""

    query_id: str
    session_id: str = ""
    user_id: str = ""
    respondent_id: str = "A"
    deadline: int | None = None
    traceparent: str = ""

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
    """A call that is waited for. `until`: in the loop's time."""

    request: ToolRequest
    future: asyncio.Future[ToolResultMessage]
    until: float
    seconds: float

    def settle(self, answer: ToolResultMessage) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, exc: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(exc)


class ToolClient:
    def __init__(self, context: Context[Any]) -> None:
        self._context = context
        # a call may be asked for twice at once: by the run that lost a query and by the one that took it over
        self._waiting: dict[str, set[_Call]] = {}
        self._deadlines: Deadlines[_Call] = Deadlines(self._due)
        self._sending: list[tuple[Outgoing, _Call]] = []
        self._looking: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        context.on_inbox("tool.result", self._receive)

    async def schemas(self) -> dict[str, dict[str, Any]]:
        """The tools that models may be offered now, by name, in the OpenAI form."""
        return await self._context.registry.tools()

    async def call(
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
    ) -> ToolResultMessage:
        """The tool's result; every failure is a result too, with a text for the model.

        timeout: seconds; what is left until the caller's deadline bounds it further.
        grace: seconds more for an answer that says itself what took so long.
        attempt: 1 says that this call id was never asked for before, which saves its worker a look; None: unknown.
        token: what proves that an answer comes from the tool's worker, where the call was asked for before; else a new
        one is made.
        internal: an operation that is meant for participants; models and users cannot name one.
        """
        tool = canonical_tool(name, args)
        request = ToolRequest(
            query_id=caller.query_id,
            call_id=call_id,
            tool=tool,
            args=args,
            session_id=caller.session_id,
            user_id=caller.user_id,
            reply_to=self._context.inbox,
            token=token or new_token(),
        )

        if not watching():
            headers = {**caller.headers(), "attempt": attempt}
            return await self._send(name, request, headers, timeout, grace, internal)

        async def send(traceparent: str) -> ToolResultMessage:
            headers = {**caller.headers(), "attempt": attempt, "traceparent": traceparent}
            return await self._send(name, request, headers, timeout, grace, internal)

        return await watched_request(request, send, caller.traceparent)

    async def _send(
        self, name: str, request: ToolRequest, headers: dict[str, Any], timeout: float, grace: float, internal: bool
    ) -> ToolResultMessage:
        tool, bus, deadline = request.tool, self._context.bus, headers["deadline"]
        # since when it is known that nobody has asked before
        headers["time"] = bus.now_ms()
        served = await self._context.registry.served(tool)
        if served is None or bool(served.get("internal")) is not internal:
            if served is None and await self._context.registry.known(tool):
                return _refused(request, "[tool unavailable]", "tool unavailable")
            return _refused(request, f"[unknown tool: '{name}']", f"unknown tool: '{name}'")
        if deadline is not None:
            timeout = max(0.0, min(timeout, (deadline - bus.now_ms()) / 1000))
        headers["deadline"] = bus.now_ms() + int((timeout + grace + _AFTERWARDS) * 1000)
        try:
            message = _request_subject(tool).of(request, **headers)
        except PydanticSerializationError as exc:
            return _refused(request, f"[tool error: {exc}]", f"the arguments cannot be sent: {exc}")
        now = self._loop.time()
        call = _Call(request, self._loop.create_future(), now + timeout + grace, timeout)
        calls = self._waiting.setdefault(request.call_id, set())
        calls.add(call)
        self._publish(message, call)
        slot = self._deadlines.add(call, min(call.until, now + _PATIENCE))
        try:
            return await call.future
        finally:
            self._deadlines.drop(call, slot)
            calls.discard(call)
            if not calls:
                self._waiting.pop(request.call_id, None)

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, message: Outgoing, call: _Call) -> None:
        """What is asked in one loop tick leaves in one write."""
        if not self._sending:
            self._loop.call_soon(self._flush)
        self._sending.append((message, call))

    def _flush(self) -> None:
        asked = [(message, call) for message, call in self._sending if not call.future.done()]
        self._sending = []
        # not repeated by the connection: a request that may be there already says that it is asked for again
        self._post(asked, retry=False)

    def _post(self, asked: Sequence[tuple[Outgoing, _Call]], *, retry: bool) -> None:
        bus = self._context.bus
        writing = bus.link.post([bus.publishing(message) for message, _ in asked], retry=retry)
        writing.add_done_callback(partial(self._written, asked))

    def _written(self, asked: Sequence[tuple[Outgoing, _Call]], writing: asyncio.Future[list[Any]]) -> None:
        if writing.cancelled():
            return
        error = writing.exception()
        if isinstance(error, ConnectionLost):
            for message, call in asked:
                if not call.future.done():
                    # each by itself: one that cannot be sent takes no other along
                    self._post([(with_header(message, attempt=None), call)], retry=True)
        elif isinstance(error, PermanentError):
            for _, call in asked:
                call.settle(_refused(call.request, f"[tool error: {error}]", str(error)))
        elif error is not None:
            for _, call in asked:
                call.fail(error)
        else:
            for (_, call), reply in zip(asked, writing.result(), strict=True):
                if not isinstance(reply, bytes):
                    try:
                        checked(reply)
                    except Local2Error as exc:
                        call.fail(exc)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────

    def _due(self, call: _Call) -> None:
        """A reply may have gone to an owner that died, or got lost: after a while the stored result is looked for."""
        if call.future.done():
            return
        looking = asyncio.create_task(self._look(call))
        self._looking.add(looking)
        looking.add_done_callback(partial(self._looked, call))

    def _looked(self, call: _Call, looking: asyncio.Task[None]) -> None:
        self._looking.discard(looking)
        if not looking.cancelled() and (error := looking.exception()) is not None:
            # a bug: whoever waits is told, instead of waiting for ever
            call.fail(error)

    async def _look(self, call: _Call) -> None:
        request, seconds, now = call.request, call.seconds, self._loop.time()
        last = now >= call.until
        try:
            async with asyncio.timeout_at(now + _LAST_LOOK if last else call.until):
                stored = await self._context.bus.link.call("GET", result_key(request.tool, request.call_id))
            if stored is not None and not stored.startswith(RUNNING):
                call.settle(decode_result(stored))
        except (Local2Error, TimeoutError) as exc:
            log.warning("tool.result_not_found", call_id=request.call_id, reason=str(exc))
        if last:
            text = f"tool timeout after {seconds:g}s"
            call.settle(_refused(request, f"[{text}]", text, seconds))
        elif not call.future.done():
            # one look at a time: while Redis is away they would pile up
            self._deadlines.add(call, min(call.until, self._loop.time() + _PATIENCE))

    def _receive(self, raw: Mapping[bytes, bytes]) -> None:
        calls = self._waiting.get(raw.get(b"call_id", b"").decode(errors="replace"))
        if not calls:
            ignored("late")
            return
        token = raw.get(b"token", b"")
        asked = [call for call in calls if secrets.compare_digest(call.request.token.encode(), token)]
        if not asked:
            # Anybody who answers anything may write here. A worker of the last release knows no token either: what it
            # has stored is found a little later.
            ignored("token")
            return
        try:
            answer = decode_result(raw.get(b"payload", b""))
        except DecodeError as exc:
            ignored("malformed")
            log.warning("tool.malformed_result", reason=str(exc))
            return
        for call in asked:
            call.settle(answer)


def new_token() -> str:
    """What only the worker of a call will know beside its caller: 128 random bits."""
    return secrets.token_urlsafe(16)


_request_subject = lru_cache(maxsize=256)(TOOL_REQUEST.for_tool)


def _refused(request: ToolRequest, text: str, error: str, seconds: float = 0.0) -> ToolResultMessage:
    return ToolResultMessage(
        query_id=request.query_id,
        call_id=request.call_id,
        tool=request.tool,
        result=text,
        error=error,
        duration_ms=round(seconds * 1000),
        session_id=request.session_id,
    )
