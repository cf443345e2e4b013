"""The data of journal entries for tests: the fields that are always there, with values of no importance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.records.events import MODELS, EntryType, KnownEvent, shown

_CALL: dict[str, Any] = {"call_id": "c", "tool": "web_search", "args": {}}
WHOLE: dict[str, dict[str, Any]] = {
    "claimed": {"query_id": "5-0", "session_id": "s"},
    "restarted": {"step": 0, "discard_after": "0-0"},
    "state": {"from": "IDLE", "action": "RECEIVE", "to": "RECEIVING"},
    "thinking": {"text": ""},
    "answer": {"text": ""},
    "message": {"step": 0, "role": "assistant", "content": ""},
    "notice": {"code": "c", "message": "m"},
    "tool.request": {**_CALL, "step": 0},
    "tool.result": {**_CALL, "result": ""},
    "attachments": {"files": []},
    "context.truncated": {"dropped_turns": 0, "kept_turns": 0, "prompt_tokens": 0},
    "persona.working": {"persona": "Ann", "round": 1},
    "persona.done": {"persona": "Ann", "round": 1},
    "completed": {"answer": "", "thinking": "", "tool_calls": [], "usage": {}, "finish_reason": "stop", "model": "m"},
    "failed": {"code": "c", "message": "m"},
    "cancelled": {"answer": "", "thinking": ""},
    "critique": {"score": 5, "feedback": "", "rubric": "realistic"},
    "pairwise": {"winner": "A", "reason": "", "score_a": 5, "score_b": 4},
    "reward": {"reward": 1.0, "sentiment": "positive", "stars": None, "comment": None},
}


def whole(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with the fields that an entry of this type always has."""
    return {**WHOLE.get(kind, {}), **data}


def event_of(kind: str, data: Mapping[str, Any]) -> KnownEvent:
    """Return an event of which only the given fields are written."""
    model: Any = MODELS[kind]
    full = model.model_validate(whole(kind, data))
    given = {name for name, field in model.model_fields.items() if name in data or field.alias in data}
    found: KnownEvent = model.model_construct(given, **dict(full))
    return found


def data_of(event: KnownEvent) -> tuple[EntryType, dict[str, Any]]:
    """Return an event's type and the data that is written."""
    return event.type, shown(event)
