"""Calls of a client's tools: their ids, and the steps before them when the client returns with results.

A client sees only the calls of its own tools. The journal of the query with the calls has the earlier thinking, the
calls of our tools and their results. A call's id contains that query's id.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from services.generator.loop import ClientCall, Message, Reply, call_of_message, tool_message
from services.generator.recorded import recorded_reply, recorded_result
from shared.bus import Bus
from shared.bus.keys import journal_key, record_key
from shared.contracts import ChatToolCall, ChatTurnMessage, ToolCallRecord
from shared.llm.port import ToolCall
from shared.records.journal import read_journal, response_id
from shared.records.response_state import ResponseState, replay

_ID = re.compile(r"call_(\d{1,15})_(\d{1,10})_(\d{1,4})_(\d{1,4})")
_NO_RESULT = "[no result was given]"


def client_call_id(query_id: str, call: ClientCall) -> str:
    """Return the id of a call for the client."""
    return f"call_{query_id.replace('-', '_')}_{call.step}_{call.position}"


async def with_own_steps(bus: Bus, user_id: str, messages: Sequence[ChatTurnMessage]) -> list[Message]:
    """Return a client's history in the model's form, with the agent's own steps between its messages.

    The steps of an expired journal are left out. Every call has a result right after it: models' templates and servers
    need it. A missing result is replaced by a text.
    """
    queries = {match["query"]: None for message in messages if (match := _origin(message))}
    runs = dict(
        zip(queries, await asyncio.gather(*(_run(bus, user_id, query_id) for query_id in queries)), strict=True)
    )
    found: list[Message] = []
    waiting: dict[str, str] = {}
    for message in messages:
        if message.role != "tool":
            found += _unanswered(waiting)
            waiting = {call.id: call.name for call in message.tool_calls or ()}
        match _origin(message), message.role:
            case {"query": query_id, "step": step}, _ if run := runs.get(query_id):
                found += _steps(query_id, run, step, message)
            case _, "tool":
                name = waiting.pop(message.tool_call_id or "", message.name or "")
                result = {"role": "tool", "content": message.content, "tool_name": name}
                files = {"attachments": message.attachments} if message.attachments else {}
                found.append({**result, "tool_call_id": message.tool_call_id or "", **files})
            case _:
                found.append(message.model_dump(exclude_none=True))
    return [*found, *_unanswered(waiting)]


def _origin(message: ChatTurnMessage) -> dict[str, Any] | None:
    """Return the query and the step that a message's calls come from; None for other messages."""
    match = _ID.fullmatch(message.tool_calls[0].id) if message.tool_calls else None
    return {"query": f"{match[1]}-{match[2]}", "step": int(match[3])} if match else None


async def _run(bus: Bus, user_id: str, query_id: str) -> ResponseState | None:
    """Return the response to the user's own query."""
    if await bus.link.call("HGET", record_key(query_id), "user_id") != user_id.encode():
        return None
    return replay(entry.typed() for entry in await read_journal(bus, journal_key(query_id, "A")))


def _steps(query_id: str, run: ResponseState, last: int, message: ChatTurnMessage) -> list[Message]:
    """Return the messages of a run up to `message`, which has client calls."""
    found: list[Message] = []
    unknown = Reply(message.content, message.thinking or "", [], "tool_calls", "")
    for step in range(last + 1):
        reply = recorded_reply(run, "", step) or unknown
        done = {
            place: record for place in range(len(reply.tool_calls)) if (record := _record(run, query_id, step, place))
        }
        placed = [(place, call_of_message(reply.tool_calls[place])) for place in done]
        if step == last:
            placed += [_placed(call, reply) for call in message.tool_calls or ()]
        if placed:
            # Keep the model's order: Gemini signs the first call.
            found.append(reply.message([call for _, call in sorted(placed, key=lambda one: one[0])]))
            found += [tool_message(reply.tool_calls[place], record) for place, record in done.items()]
    return found


def _placed(call: ChatToolCall, reply: Reply) -> tuple[int, dict[str, Any]]:
    """Return a client's call with its place in the reply, and with its signature from there."""
    match = _ID.fullmatch(call.id)
    place = int(match[4]) if match else len(reply.tool_calls)
    signature = reply.tool_calls[place].signature if place < len(reply.tool_calls) else None
    return place, call_of_message(ToolCall(call.id, call.name, call.args, signature=signature))


def _record(run: ResponseState, query_id: str, step: int, position: int) -> ToolCallRecord | None:
    return recorded_result(run, f"{response_id(query_id, 'A')}:{step}:{position}")


def _unanswered(waiting: dict[str, str]) -> list[Message]:
    return [
        {"role": "tool", "content": _NO_RESULT, "tool_name": name, "tool_call_id": call_id}
        for call_id, name in waiting.items()
    ]
