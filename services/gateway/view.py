"""A journal as the result that a client reads: pure, entries in, JSON values out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.gateway.records import QueryRecord
from shared.bus import order
from shared.contracts import (
    AGENT_TRANSITION,
    ANSWER_DIALOG,
    CRITIQUE_RESULT,
    PAIRWISE_RESULT,
    QUERY_CANCEL,
    QUERY_RECEIVED,
    RESPONSE_GENERATION,
    REWARD_EVENT,
    TOOL_REQUEST,
    TOOL_RESULT,
)
from shared.records.journal import TERMINAL, EntryType, JournalEntry

_STATES = {
    EntryType.COMPLETED: "completed",
    EntryType.FAILED: "failed",
    EntryType.CANCELLED: "cancelled",
}


def result(record: QueryRecord, entries: Sequence[JournalEntry]) -> dict[str, Any]:
    """Everything known of a response so far; the same fields from the first entry to the last."""
    shown: dict[str, Any] = {
        "query_id": record.query_id,
        "session_id": record.session_id,
        "state": "running" if entries else "queued",
        "query": record.query,
        "answer": "",
        "thinking": "",
        "tool_calls": [],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
        "model": None,
        "finish_reason": None,
        "notices": [],
    }
    _so_far(shown, entries)
    for entry in entries:
        if entry.type in TERMINAL:
            _finished(shown, entry)
        elif entry.type is EntryType.CRITIQUE:
            shown["critique"] = entry.value()
        elif entry.type is EntryType.PAIRWISE:
            shown["pairwise"] = entry.value()
        elif entry.type is EntryType.REWARD:
            # the last vote counts
            shown["reward"] = entry.value()
    log = [{"subject": subject, "t": _seconds(record, at)} for subject, at in _subjects(record, entries)]
    shown["events"] = [event["subject"] for event in log]
    shown["event_log"] = log
    return shown


def _so_far(shown: dict[str, Any], entries: Sequence[JournalEntry]) -> None:
    """The parts of a response that is still being written."""
    thinking: list[str] = []
    answer: list[str] = []
    calls: dict[str, dict[str, Any]] = {}
    usage = shown["usage"]
    for entry in _kept(entries):
        match entry.type:
            case EntryType.CLAIMED:
                shown["model"] = entry.value().get("model")
            case EntryType.THINKING | EntryType.ANSWER:
                value = entry.value()
                if "persona" not in value:
                    (thinking if entry.type is EntryType.THINKING else answer).append(value["text"])
            case EntryType.MESSAGE:
                value = entry.value()
                usage["prompt_tokens"] += value.get("prompt_tokens") or 0
                usage["completion_tokens"] += value.get("completion_tokens") or 0
                if value.get("tool_calls") and "persona" not in value:
                    # what was said before a tool call is not part of the answer
                    answer.clear()
            case EntryType.NOTICE:
                shown["notices"].append(entry.value())
            case EntryType.TOOL_REQUEST | EntryType.TOOL_RESULT:
                value = entry.value()
                call = calls.setdefault(value["call_id"], {"tool": value["tool"], "args": {}, "result": None})
                call.update(value)
                call.pop("step", None)
            case _:
                pass
    shown["thinking"] = "".join(thinking)
    shown["answer"] = "".join(answer)
    shown["tool_calls"] = list(calls.values())


def _kept(entries: Sequence[JournalEntry]) -> Iterator[JournalEntry]:
    """The entries without the text of model calls that were started again."""
    cuts = [
        (order(entry.value()["discard_after"]), order(entry.id))
        for entry in entries
        if entry.type is EntryType.RESTARTED
    ]
    for entry in entries:
        at = order(entry.id)
        delta = entry.type in (EntryType.THINKING, EntryType.ANSWER)
        if not (delta and any(first < at < last for first, last in cuts)):
            yield entry


def _finished(shown: dict[str, Any], entry: JournalEntry) -> None:
    value = entry.value()
    shown["state"] = _STATES[entry.type]
    if entry.type is EntryType.FAILED:
        shown["error"] = {"code": value.get("code", "internal"), "message": value.get("message", "")}
        return
    for name in ("answer", "thinking", "tool_calls", "usage", "model", "finish_reason", "deliberations"):
        if value.get(name) is not None:
            shown[name] = value[name]
    if entry.type is EntryType.CANCELLED:
        shown["finish_reason"] = "cancelled"


def _subjects(record: QueryRecord, entries: Sequence[JournalEntry]) -> Iterator[tuple[str, int]]:
    """The bus messages of this response that its journal proves, in order, with their times in ms."""
    yield QUERY_RECEIVED.name, record.accepted
    for entry in entries:
        match entry.type:
            case EntryType.STATE:
                yield AGENT_TRANSITION.name, entry.time
            case EntryType.TOOL_REQUEST:
                yield f"{TOOL_REQUEST.name}.{entry.value()['tool']}", entry.time
            case EntryType.TOOL_RESULT:
                yield f"{TOOL_RESULT.name}.{entry.value()['tool']}", entry.time
            case EntryType.COMPLETED:
                yield RESPONSE_GENERATION.name, entry.time
                yield ANSWER_DIALOG.name, entry.time
            case EntryType.CANCELLED:
                yield QUERY_CANCEL.name, entry.time
            case EntryType.CRITIQUE:
                yield CRITIQUE_RESULT.name, entry.time
            case EntryType.PAIRWISE:
                yield PAIRWISE_RESULT.name, entry.time
            case EntryType.REWARD:
                yield REWARD_EVENT.name, entry.time
            case _:
                pass


def _seconds(record: QueryRecord, at: int) -> float:
    # clocks of two machines may differ a little
    return max(0, at - record.accepted) / 1000
