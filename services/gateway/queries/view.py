"""A journal as the result that a client reads: pure, entries in, JSON values out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.gateway.queries.records import QueryRecord
from shared.bus import order
from shared.records.journal import EntryType, JournalEntry
from shared.records.sessions import words_of

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


class View:
    """Takes the entries as they are read, oldest first."""

    def __init__(self, record: QueryRecord) -> None:
        self._record = record
        self._shown: dict[str, Any] = {
            "query_id": record.query_id,
            "session_id": record.session_id,
            "state": "queued",
            "query": words_of(record.query),
            "answer": "",
            "said_before": [],
            "thinking": "",
            "tool_calls": [],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0},
            "model": None,
            "finish_reason": None,
            "notices": [],
        }
        self._notices: list[dict[str, Any]] = []
        # names of files that were not sent, by form and id
        self._not_sent: dict[str, dict[str, str]] = {form: {} for form in _NOT_SENT}
        self._dropped_turns = 0
        self._ended: JournalEntry | None = None
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
        shown["notices"] = [*self._notices, *self._left_out()]
        if self._ended is not None:
            _finish(shown, self._ended)
            # a large result is told where it came alone
            shown["tool_calls"] = [self._with_result(call) for call in shown["tool_calls"]]
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
                self._notices.append({name: value.get(name) for name in ("code", "message")})
            case EntryType.ATTACHMENTS:
                for file in _files(value.get("files")):
                    self._leave_out(str(file.get("sent")), file)
            case EntryType.CONTEXT_TRUNCATED:
                dropped = value.get("dropped_turns")
                self._dropped_turns = max(self._dropped_turns, dropped if isinstance(dropped, int) else 0)
                for file in _files(value.get("attachments")):
                    self._leave_out("left_out", file)
            case EntryType.TOOL_REQUEST | EntryType.TOOL_RESULT:
                self._call(value)
            case EntryType.COMPLETED | EntryType.FAILED | EntryType.CANCELLED:
                self._ended = entry
            case EntryType.CRITIQUE:
                shown["critique"] = value
            case EntryType.PAIRWISE:
                shown["pairwise"] = value
            case EntryType.REWARD:
                # as the vote is after its last change
                shown.pop("reward", None)
                if value.get("reward") is not None:
                    shown["reward"] = value
            case _:
                pass

    def _leave_out(self, form: str, file: dict[str, Any]) -> None:
        if form in self._not_sent:
            self._not_sent[form][str(file.get("id"))] = str(file.get("name") or "a file")

    def _left_out(self) -> list[dict[str, Any]]:
        """Return a notice of each kind of content that the model did not get."""
        found = []
        if self._dropped_turns:
            turns = "turn is" if self._dropped_turns == 1 else f"{self._dropped_turns} turns are"
            message = f"the conversation does not fit the model's context: the oldest {turns} left out"
            found.append({"code": "turns_left_out", "message": message})
        for form, (code, message) in _NOT_SENT.items():
            if names := self._not_sent[form].values():
                found.append({"code": code, "message": message.format(", ".join(names))})
        return found

    def _call(self, value: dict[str, Any]) -> None:
        call = self._calls.setdefault(
            str(value.get("call_id")), {"tool": value.get("tool"), "args": {}, "result": None}
        )
        call.update(value)
        call.pop("step", None)

    def _with_result(self, call: dict[str, Any]) -> dict[str, Any]:
        if "result_in" not in call:
            return call
        told = self._calls.get(str(call.get("call_id")), {})
        whole = {name: value for name, value in call.items() if name != "result_in"}
        return {**whole, "result": told.get("result"), "data": told.get("data")}

    def _discard(self, valid: tuple[int, int]) -> None:
        for name, pieces in self._said.items():
            self._said[name] = [piece for piece in pieces if piece[0] <= valid]


def _files(listed: Any) -> list[dict[str, Any]]:
    """Return the files that an entry lists. What has another form is left out."""
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


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
