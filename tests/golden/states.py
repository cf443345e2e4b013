"""The state of a response as JSON values that both reducers give: this one and the console's (golden.test.ts)."""

from __future__ import annotations

import hashlib
from typing import Any

from shared.records.response_state import Call, Part, ResponseState, Text

# Characters of a text that are written out.
_MOST = 200


def digest(text: str) -> str:
    """The length of a text and the beginning of its hash."""
    return f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def form(state: ResponseState) -> dict[str, Any]:
    return {
        "last": state.last,
        "end": state.end and state.end.event.type,
        "answer": _short(state.answer),
        "spent": state.spent,
        "parts": [{"id": part.id, **_form(part)} for part in state.parts],
    }


def _form(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"kind": part.kind, "speaker": part.speaker, "text": _short(part.text), "said": part.said}
    if isinstance(part, Call):
        ended = part.answered and {"result": _short(part.answered.result), "error": part.answered.error}
        names = {"call_id": part.latest.call_id, "tool": part.latest.tool}
        return {"kind": "call", "speaker": part.speaker, "asked": part.asked is not None, **names, "answered": ended}
    return {"kind": part.event.type, "speaker": part.event.speaker}


def _short(text: str) -> str:
    return text if len(text) <= _MOST else digest(text)
