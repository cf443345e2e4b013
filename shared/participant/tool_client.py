"""Calling a tool over the bus: one inbox, one reader, a table of futures by call id."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shared.contracts import TOOL_REQUEST, ToolRequest, ToolResultMessage, canonical_tool
from shared.envelope import now_ms
from shared.errors import DecodeError
from shared.participant.service import Context
from shared.participant.tool import decode_result, result_key
from shared.participant.tool_watch import watched_request
from shared.telemetry.logging import get_logger

log = get_logger()

# After this long without a reply the stored result is looked up: a reply may have gone to an owner that died.
_PATIENCE = 1.0
# The worker stops a call this much later than nobody waits for it any more: its last words would say less than ours.
_AFTERWARDS = 0.25


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a tool is called. `deadline` is in ms since the epoch."""

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
class _Place:
    """Where somebody waits for a call's answer; None when it is time to look for it."""

    future: asyncio.Future[ToolResultMessage | None]


class ToolClient:
    def __init__(self, context: Context[Any]) -> None:
        self._context = context
        # a call may be asked for twice at once: by the run that lost a query and by the one that took it over
        self._waiting: dict[str, set[_Place]] = {}
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
        attempt: int = 1,
        internal: bool = False,
    ) -> ToolResultMessage:
        """The tool's result; every failure is a result too, with a text for the model.

        timeout: seconds; what is left until the caller's deadline bounds it further.
        grace: seconds more for an answer that says itself what took so long.
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
        )

        async def send(traceparent: str) -> ToolResultMessage:
            headers = {**caller.headers(), "attempt": attempt, "traceparent": traceparent}
            return await self._send(name, request, headers, timeout, grace, internal)

        return await watched_request(request, send, caller.traceparent)

    async def _send(
        self, name: str, request: ToolRequest, headers: dict[str, Any], timeout: float, grace: float, internal: bool
    ) -> ToolResultMessage:
        tool, call_id, deadline = request.tool, request.call_id, headers["deadline"]
        served = await self._context.registry.served(tool)
        if served is None or bool(served.get("internal")) is not internal:
            if served is None and await self._context.registry.known(tool):
                return _refused(request, "[tool unavailable]", "tool unavailable")
            return _refused(request, f"[unknown tool: '{name}']", f"unknown tool: '{name}'")
        if deadline is not None:
            timeout = max(0.0, min(timeout, (deadline - now_ms()) / 1000))
        place = _Place(asyncio.get_running_loop().create_future())
        places = self._waiting.setdefault(call_id, set())
        places.add(place)
        try:
            until = now_ms() + int((timeout + grace + _AFTERWARDS) * 1000)
            message = _request_subject(tool).of(request, **{**headers, "deadline": until})
            await self._context.bus.publish(message)
            return await self._wait(request, place, timeout, grace)
        finally:
            places.discard(place)
            if not places:
                del self._waiting[call_id]

    async def _wait(self, request: ToolRequest, place: _Place, timeout: float, grace: float) -> ToolResultMessage:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout + grace
        while (remaining := until - loop.time()) > 0:
            impatience = loop.call_later(min(_PATIENCE, remaining), _look, place.future)
            try:
                answer = await place.future
            finally:
                impatience.cancel()
            if answer is not None:
                return answer
            # in place before the look: a reply that comes meanwhile is not missed
            place.future = loop.create_future()
            stored = await self._context.bus.link.call("GET", result_key(request.tool, request.call_id))
            if stored is not None and not stored.startswith(b"running:"):
                return decode_result(stored)
        return _refused(request, f"[tool timeout after {timeout:g}s]", f"tool timeout after {timeout:g}s", timeout)

    def _receive(self, raw: Mapping[bytes, bytes]) -> None:
        places = self._waiting.get(raw.get(b"call_id", b"").decode(errors="replace"))
        if not places:
            return  # nobody waits any more
        try:
            answer = decode_result(raw.get(b"payload", b""))
        except DecodeError as exc:
            log.warning("tool.malformed_result", reason=str(exc))
            return
        for place in places:
            if not place.future.done():
                place.future.set_result(answer)


_request_subject = lru_cache(maxsize=256)(TOOL_REQUEST.for_tool)


def _look(future: asyncio.Future[ToolResultMessage | None]) -> None:
    """Ends a wait that takes long: the answer may be stored."""
    if not future.done():
        future.set_result(None)


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
