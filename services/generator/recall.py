"""What a journal already holds: the finished steps of a run, for the replica that continues it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.generator.earlier import Form
from services.generator.grades import LowGrade
from services.generator.loop import Reply, call_of_message
from shared.contracts import ToolCallRecord
from shared.llm.port import ToolCall
from shared.records.events import (
    Entry,
    FilesSent,
    ModelMessage,
    Noticed,
    PersonaDone,
    PersonaWorking,
    Speaker,
    ToolAnswered,
    Transition,
)
from shared.records.journal import JournalEntry
from shared.records.response_state import ResponseState, replay


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
    terminal: Entry | None = None

    def spent(self) -> dict[str, int]:
        """Tokens of all model calls, those of a committee's members too; what one that was broken off took nobody
        tells."""
        replies = self.replies.values()
        return {
            "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
            "completion_tokens": sum(reply.completion_tokens for reply in replies),
        }


def recall(entries: Sequence[JournalEntry]) -> Recall:
    """Read a journal, oldest entry first."""
    return recalled(replay(entry.typed() for entry in entries))


def recalled(state: ResponseState) -> Recall:
    """Return the finished steps of a response."""
    grades = [_low_grade(notice) for notice in state.events(Noticed) if notice.code == "low_grade"]
    files = [_forms(sent) for sent in state.events(FilesSent)]
    return Recall(
        replies={(message.scope, message.step): reply_of(message) for message in state.events(ModelMessage)},
        results={call.answered.call_id: _record(call.answered) for call in state.calls if call.answered},
        requested={call.asked.call_id: call.token for call in state.calls if call.asked},
        states=sum(1 for _ in state.events(Transition)),
        progress={
            *((event.type, event.persona, event.round) for event in state.events(PersonaWorking)),
            *((event.type, event.persona, event.round) for event in state.events(PersonaDone)),
        },
        notices={notice.code for notice in state.events(Noticed)},
        low_grade=grades[-1] if grades else None,
        earlier=files[-1] if files else None,
        unsettled=state.unsettled,
        terminal=state.end,
    )


def _record(answered: ToolAnswered) -> ToolCallRecord:
    names = ToolCallRecord.model_fields
    return ToolCallRecord(**{name: value for name, value in answered if name in names})


def _low_grade(notice: Noticed) -> LowGrade:
    return LowGrade(notice.about, notice.score, notice.note)


def _forms(sent: FilesSent) -> dict[str, Form]:
    """Return the forms of files. A form of a newer release is left out: the file is looked up again."""
    known = {form.value for form in Form}
    return {file.id: Form(file.sent) for file in sent.files if file.sent in known}


def speaker(labels: Mapping[str, Any]) -> Speaker:
    """Return whose text has these labels."""
    return (str(labels["persona"]), int(labels.get("round") or 0)) if "persona" in labels else None


def written(call: ToolCall) -> dict[str, Any]:
    """A call as it stands in a message's entry."""
    data = call_of_message(call)
    return data if call.error is None else {**data, "error": call.error}


def reply_of(message: ModelMessage) -> Reply:
    context = message.context
    return Reply(
        content=message.content,
        thinking=message.thinking,
        tool_calls=[ToolCall(call.id, call.name, call.args, call.error, call.signature) for call in message.tool_calls],
        finish_reason=message.finish_reason,
        model=message.model,
        prompt_tokens=message.prompt_tokens or 0,
        completion_tokens=message.completion_tokens or 0,
        context=(context.tokens, context.window) if context else (0, 0),
        ratio=(context.ratio or None) if context else None,
        reasoning_details=message.reasoning_details,
        image_tokens=(context.image_tokens or None) if context else None,
    )


def partial_text(entries: Sequence[JournalEntry]) -> tuple[str, str]:
    """(answer, thinking) as a client shows them at this point: void text left out, as is text before a tool call."""
    state = replay(entry.typed() for entry in entries)
    return state.answer, state.thinking
