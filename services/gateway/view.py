"""A journal as the result that a client reads: pure, entries in, JSON values out."""

from __future__ import annotations

from collections.abc import Iterable
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
from shared.records.journal import EntryType, JournalEntry

_RESULT = (
    "answer",
    "said_before",
    "thinking",
    "tool_calls",
    "usage",
    "model",
    "finish_reason",
    "deliberations",
    "client_calls",
)
_DELTAS = frozenset({EntryType.THINKING, EntryType.ANSWER})


class View:
    """Takes the entries as they are read, oldest first."""

    def __init__(self, record: QueryRecord) -> None:
        self._record = record
        self._shown: dict[str, Any] = {
            "query_id": record.query_id,
            "session_id": record.session_id,
            "state": "queued",
            "query": record.query,
            "answer": "",
            "said_before": [],
            "thinking": "",
            "tool_calls": [],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0},
            "model": None,
            "finish_reason": None,
            "notices": [],
        }
        self._ended: JournalEntry | None = None
        self._log = [{"subject": QUERY_RECEIVED.name, "t": 0.0}]
        # of a response that is still being written, or was given up
        self._said: dict[str, list[tuple[tuple[int, int], str]]] = {"thinking": [], "answer": []}
        self._calls: dict[str, dict[str, Any]] = {}

    def add(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            if entry.type in _DELTAS:
                self._say(entry)
            else:
                self._take(entry)

    def shown(self) -> dict[str, Any]:
        """Everything known of the response so far; the same fields from the first entry to the last."""
        shown = self._shown
        for name, pieces in self._said.items():
            shown[name] = "".join([text for _, text in pieces])
        shown["tool_calls"] = list(self._calls.values())
        if self._ended is not None:
            _finish(shown, self._ended)
        shown["events"] = [event["subject"] for event in self._log]
        shown["event_log"] = self._log
        return shown

    def _say(self, entry: JournalEntry) -> None:
        self._running()
        if b'"persona"' not in entry.data or "persona" not in entry.value():
            self._said[entry.type].append((order(entry.id), entry.text()))

    def _running(self) -> None:
        if self._shown["state"] == "queued":
            self._shown["state"] = "running"

    def _take(self, entry: JournalEntry) -> None:
        self._running()
        shown, value = self._shown, entry.value()
        match entry.type:
            case EntryType.CLAIMED:
                shown["model"] = value.get("model")
            case EntryType.STATE:
                self._crossed(entry, AGENT_TRANSITION.name)
            case EntryType.MESSAGE:
                for name in shown["usage"]:
                    count = value.get(name)
                    shown["usage"][name] += count if isinstance(count, int) else 0
                if value.get("tool_calls") and "persona" not in value:
                    # what was said before a tool call is not part of the answer
                    self._said["answer"].clear()
            case EntryType.RESTARTED:
                # the text of a model call that was started again
                self._discard(entry.valid_until())
            case EntryType.NOTICE:
                shown["notices"].append({name: value.get(name) for name in ("code", "message")})
            case EntryType.TOOL_REQUEST:
                self._crossed(entry, f"{TOOL_REQUEST.name}.{value.get('tool')}")
                self._call(value)
            case EntryType.TOOL_RESULT:
                self._crossed(entry, f"{TOOL_RESULT.name}.{value.get('tool')}")
                self._call(value)
            case EntryType.COMPLETED:
                self._ended = entry
                if value.get("published", True):
                    self._crossed(entry, RESPONSE_GENERATION.name, ANSWER_DIALOG.name)
            case EntryType.FAILED:
                self._ended = entry
            case EntryType.CANCELLED:
                self._ended = entry
                self._crossed(entry, QUERY_CANCEL.name)
            case EntryType.CRITIQUE:
                shown["critique"] = value
                self._crossed(entry, CRITIQUE_RESULT.name)
            case EntryType.PAIRWISE:
                shown["pairwise"] = value
                self._crossed(entry, PAIRWISE_RESULT.name)
            case EntryType.REWARD:
                # the last vote counts
                shown["reward"] = value
                self._crossed(entry, REWARD_EVENT.name)
            case _:
                pass

    def _call(self, value: dict[str, Any]) -> None:
        call = self._calls.setdefault(
            str(value.get("call_id")), {"tool": value.get("tool"), "args": {}, "result": None}
        )
        call.update(value)
        call.pop("step", None)

    def _discard(self, valid: tuple[int, int]) -> None:
        for name, pieces in self._said.items():
            self._said[name] = [piece for piece in pieces if piece[0] <= valid]

    def _crossed(self, entry: JournalEntry, *subjects: str) -> None:
        """The bus messages of this response that its journal proves, in order."""
        # clocks of two machines may differ a little
        seconds = max(0, entry.time - self._record.accepted) / 1000
        self._log += [{"subject": subject, "t": seconds} for subject in subjects]


def _finish(shown: dict[str, Any], entry: JournalEntry) -> None:
    value = entry.value()
    shown["state"] = str(entry.type)
    if entry.type is EntryType.FAILED:
        shown["error"] = {"code": entry.text("code") or "internal", "message": entry.text("message")}
        return
    for name in _RESULT:
        if value.get(name) is not None:
            shown[name] = value[name]
    if entry.type is EntryType.CANCELLED:
        shown["finish_reason"] = "cancelled"
