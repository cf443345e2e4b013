"""Tool calls as spans and counters, at their worker and at their caller."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from shared.contracts import ToolRequest, ToolResultMessage
from shared.errors import ToolError
from shared.telemetry import metrics, tracing
from shared.telemetry.outcome import Outcome
from shared.telemetry.spans import Kind, Value

R = TypeVar("R")

_TIMEOUT = re.compile(r"\btimeout after \d|^the query's deadline has passed$")


def watching() -> bool:
    """Whether anybody wants to know of calls."""
    return metrics.meter() is not None or tracing.active()


async def watched_call(request: ToolRequest, running: Awaitable[R]) -> R:
    """A call at its worker."""
    started = time.perf_counter()
    outcome: Outcome = "error"
    try:
        with tracing.span(
            f"execute_tool {request.tool}",
            Kind.INTERNAL,
            attributes_of(request.tool, request.call_id, request.query_id, request.session_id),
        ):
            result = await running
        outcome = "ok"
        return result
    except ToolError as exc:
        outcome = _outcome(str(exc))
        raise
    except BaseException as exc:
        outcome = "error" if isinstance(exc, Exception) else "cancelled"
        raise
    finally:
        if (meter := metrics.meter()) is not None:
            meter.tool_call(request.tool, outcome, time.perf_counter() - started)


async def watched_request(
    attributes: Mapping[str, Value | None], traceparent: str, send: Callable[[str], Awaitable[ToolResultMessage]]
) -> ToolResultMessage:
    """A call at its caller; `send` is given the traceparent for the message."""
    tool = str(attributes["gen_ai.tool.name"])
    started = time.perf_counter()
    outcome: Outcome = "cancelled"
    try:
        with tracing.span(
            f"execute_tool {tool}",
            Kind.CLIENT,
            attributes,
            parent="" if tracing.current() else traceparent,
        ) as span:
            answer = await send(span.traceparent or traceparent)
            outcome = "ok" if answer.error is None else _outcome(answer.error)
            if outcome != "ok":
                span.fail(outcome)
        return answer
    except Exception:
        outcome = "error"
        raise
    finally:
        if (meter := metrics.meter()) is not None:
            meter.tool_request(tool, outcome, time.perf_counter() - started)


def attributes_of(tool: str, call_id: str, query_id: str, session_id: str) -> dict[str, Value | None]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        "gen_ai.conversation.id": session_id or None,
        "local2.query.id": query_id,
    }


def _outcome(error: str) -> Outcome:
    """The kind of a tool's failure; its text is for the model."""
    if _TIMEOUT.search(error):
        return "timeout"
    if error == "cancelled":
        return "cancelled"
    if error == "tool unavailable":
        return "unavailable"
    return "unknown" if error.startswith("unknown tool") else "error"
