"""What a journal already holds: the finished steps of a run, for the replica that continues it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.generator.earlier import Form, decided
from services.generator.grades import LowGrade
from services.generator.loop import Reply, call_of_message
from shared.bus import order
from shared.contracts import ToolCallRecord
from shared.llm.port import ToolCall
from shared.records.journal import TERMINAL, EntryType, JournalEntry
from shared.telemetry.unread import not_understood

_PARTIAL = frozenset({EntryType.THINKING, EntryType.ANSWER})
# Entries that end the partial text before them: it is either complete or declared void.
_SETTLES = frozenset({EntryType.MESSAGE, EntryType.RESTARTED})


# Whose text it is: a committee member and its round, or nothing for who answers.
Speaker = tuple[str, int] | None


@dataclass(slots=True)
class Recall:
    """replies: by (scope, step), those since included. results and requested (tokens): by call id. states: how many
    transitions were shown.

    low_grade: the note on an earlier answer's grade in the prompt. earlier: the forms of files of earlier messages, by
    id; None: not decided yet.
    unsettled: by speaker the last entry before partial text that no checkpoint covers.
    """

    replies: dict[tuple[str, int], Reply] = field(default_factory=dict)
    results: dict[str, ToolCallRecord] = field(default_factory=dict)
    requested: dict[str, str] = field(default_factory=dict)
    states: int = 0
    progress: set[tuple[str, str, int]] = field(default_factory=set)
    notices: set[str] = field(default_factory=set)
    low_grade: LowGrade | None = None
    earlier: dict[str, Form] | None = None
    unsettled: dict[Speaker, str] = field(default_factory=dict)
    terminal: JournalEntry | None = None

    def spent(self) -> dict[str, int]:
        """Tokens of all model calls, those of a committee's members too; what one that was broken off took nobody
        tells."""
        replies = self.replies.values()
        return {
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "completion_tokens": sum(reply.completion_tokens for reply in replies),
        }


def recall(entries: Sequence[JournalEntry]) -> Recall:
    """Reads a journal, oldest entry first."""
    found = Recall()
    before = "0-0"
    for entry in entries:
        if entry.type in _PARTIAL:
            found.unsettled.setdefault(_speaker_of(entry), before)
        elif entry.type in _SETTLES:
            found.unsettled.pop(_speaker_of(entry), None)
        before = entry.id
        # what cannot be read was not written by an owner of this journal
        try:
            _take(found, entry)
        except (KeyError, TypeError, ValueError) as exc:
            not_understood("a journal", entry.id, f"{entry.type}: {exc!r}", entry.data)
        if entry.type in TERMINAL:
            found.terminal = entry
            break
    return found


def speaker(labels: Mapping[str, Any]) -> Speaker:
    """Of an entry's fields."""
    return (str(labels["persona"]), int(labels.get("round") or 0)) if "persona" in labels else None


def _speaker_of(entry: JournalEntry) -> Speaker:
    # deltas are many, and most are nobody's of a committee
    return speaker(entry.value()) if b'"persona"' in entry.data else None


def _take(found: Recall, entry: JournalEntry) -> None:
    match entry.type:
        case EntryType.STATE:
            found.states += 1
        case EntryType.MESSAGE:
            data = entry.value()
            found.replies[data.get("scope", ""), data["step"]] = reply_of(data)
        case EntryType.TOOL_REQUEST:
            found.requested[entry.value()["call_id"]] = entry.token
        case EntryType.TOOL_RESULT:
            record = ToolCallRecord.model_validate(entry.value(), extra="ignore")
            found.results[record.call_id] = record
        case EntryType.PERSONA_WORKING | EntryType.PERSONA_DONE:
            data = entry.value()
            found.progress.add((entry.type, data["persona"], data["round"]))
        case EntryType.ATTACHMENTS:
            found.earlier = decided(entry.value())
        case EntryType.NOTICE:
            found.notices.add(entry.value()["code"])
            if entry.value()["code"] == "low_grade":
                found.low_grade = LowGrade.parse(entry.value())


def written(call: ToolCall) -> dict[str, Any]:
    """A call as it stands in a message's entry."""
    data = call_of_message(call)
    return data if call.error is None else {**data, "error": call.error}


def reply_of(data: dict[str, Any]) -> Reply:
    context = data.get("context") or {}
    return Reply(
        content=data["content"],
        thinking=data["thinking"],
        tool_calls=[
            ToolCall(call["id"], call["name"], call["args"], call.get("error"), call.get("signature"))
            for call in data["tool_calls"]
        ],
        finish_reason=data["finish_reason"],
        model=data["model"],
        prompt_tokens=data["prompt_tokens"] or 0,
        completion_tokens=data["completion_tokens"] or 0,
        context=(context.get("tokens") or 0, context.get("window") or 0),
        ratio=context.get("ratio"),
        reasoning_details=data.get("reasoning_details") or (),
        image_tokens=context.get("image_tokens"),
    )


def partial_text(entries: Sequence[JournalEntry]) -> tuple[str, str]:
    """(answer, thinking) as a client shows them at this point: void text left out, as is text before a tool call."""
    answer: list[tuple[str, str]] = []
    thinking: list[tuple[str, str]] = []
    for entry in entries:
        match entry.type:
            case EntryType.ANSWER | EntryType.THINKING | EntryType.MESSAGE | EntryType.RESTARTED if (
                _speaker_of(entry) is not None
            ):
                continue
            case EntryType.ANSWER:
                answer.append((entry.id, entry.text()))
            case EntryType.THINKING:
                thinking.append((entry.id, entry.text()))
            case EntryType.RESTARTED:
                valid = entry.valid_until()
                answer = [piece for piece in answer if order(piece[0]) <= valid]
                thinking = [piece for piece in thinking if order(piece[0]) <= valid]
            case EntryType.MESSAGE if entry.value().get("tool_calls"):
                answer = []
    return "".join(text for _, text in answer), "".join(text for _, text in thinking)
