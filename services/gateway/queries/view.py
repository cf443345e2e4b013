"""A response as the result that a client reads. Pure."""

from __future__ import annotations

from typing import Any

from services.gateway.queries.records import QueryRecord
from shared.records import events
from shared.records.events import CallEnded, Claimed, Failed, FilesSent, Noticed, Truncated, shown
from shared.records.response_state import NO_ENTRY, Call, ResponseState
from shared.records.sessions import words_of

_RESULT = ("answer", "said_before", "thinking", "usage", "model", "finish_reason", "deliberations", "client_calls")
# Notices of files of earlier messages that the model did not get, by the form of the file in the journal: code, text.
_NOT_SENT = {
    "left_out": (
        "images_left_out",
        "images of earlier messages do not fit the model's context and are left out: {}; attach them again to ask "
        "about them",
    ),
    "unseen": ("images_unseen", "the model cannot see images; it has only the names of these: {}"),
    "unreadable": ("files_unreadable", "the text of these files cannot be read: {}"),
    "away": ("files_unavailable", "the memory does not answer, and the model has only the names of these files: {}"),
}


def result(record: QueryRecord, state: ResponseState) -> dict[str, Any]:
    """Return everything known of a response so far; the same fields from its first entry to its last."""
    claims = list(state.events(Claimed))
    found: dict[str, Any] = {
        "query_id": record.query_id,
        "session_id": record.session_id,
        "state": "queued" if state.last == NO_ENTRY else "running",
        "query": words_of(record.query),
        "answer": state.answer,
        "said_before": [],
        "thinking": state.thinking,
        "tool_calls": [_call(call) for call in state.calls],
        "usage": state.spent,
        "model": claims[-1].model if claims else None,
        "finish_reason": None,
        "notices": [{"code": one.code, "message": one.message} for one in state.events(Noticed)] + _left_out(state),
    }
    return found | _late(state) | _ending(state)


def _call(call: Call) -> dict[str, Any]:
    """Return a call, which runs while it has no result."""
    found = {"tool": call.latest.tool, "args": call.latest.args, "result": None}
    asked = shown(call.asked) if call.asked else {}
    answered = shown(call.answered) if call.answered else {}
    return {name: value for name, value in {**found, **asked, **answered}.items() if name != "step"}


def _ended(call: CallEnded) -> dict[str, Any]:
    """Return a call of a completed answer."""
    found = call.model_dump(mode="json", exclude={"result_in"}, exclude_unset=True)
    return found | {"result": None, "data": None} if call.result_in else found


def error_of(end: Failed) -> dict[str, Any]:
    return {"code": end.code or "internal", "message": end.message}


def _ending(state: ResponseState) -> dict[str, Any]:
    """Return the fields that the terminal entry decides."""
    match state.end.event if state.end else None:
        case events.Completed() as end:
            told = shown(end)
            fields = {name: told[name] for name in _RESULT if name in told}
            return {"state": "completed", "tool_calls": [_ended(call) for call in state.ended_calls], **fields}
        case Failed() as end:
            return {"state": "failed", "error": error_of(end)}
        case events.Cancelled() as end:
            return {"state": "cancelled", **shown(end), "finish_reason": "cancelled"}
        case _:
            return {}


def _late(state: ResponseState) -> dict[str, Any]:
    """Return what other participants added: the newest of each type, and no vote that was withdrawn."""
    found: dict[str, Any] = {}
    for grade in state.events(events.CritiqueShown):
        found["critique"] = shown(grade)
    for verdict in state.events(events.PairwiseShown):
        found["pairwise"] = shown(verdict)
    votes = list(state.events(events.RewardShown))
    if votes and votes[-1].reward is not None:
        found["reward"] = shown(votes[-1])
    return found


def _left_out(state: ResponseState) -> list[dict[str, Any]]:
    """Return a notice of each kind of content that the model did not get."""
    cuts = list(state.events(Truncated))
    names: dict[str, dict[str, str]] = {form: {} for form in _NOT_SENT}
    for sent in state.events(FilesSent):
        for file in sent.files:
            names.get(file.sent, {})[file.id] = file.name or "a file"
    for cut in cuts:
        for image in cut.attachments:
            names["left_out"][image.id] = image.name or "a file"
    found = []
    if dropped := max((cut.dropped_turns for cut in cuts), default=0):
        turns = "turn is" if dropped == 1 else f"{dropped} turns are"
        message = f"the conversation does not fit the model's context: the oldest {turns} left out"
        found.append({"code": "turns_left_out", "message": message})
    for form, (code, text) in _NOT_SENT.items():
        if names[form]:
            found.append({"code": code, "message": text.format(", ".join(names[form].values()))})
    return found
