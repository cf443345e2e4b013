"""A journal for clients that can only append text: OpenAI's streams. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from shared.records import events
from shared.records.events import Entry, EntryType, ToolAnswered, ToolAsked
from shared.records.response_state import EMPTY, apply

Kind = Literal["thinking", "answer"]
_KINDS: dict[Kind, EntryType] = {"thinking": EntryType.THINKING, "answer": EntryType.ANSWER}
# Characters of a call's arguments that a line shows.
_MOST = 200


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the thinking or of the answer."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Completed:
    """The data of the terminal entry of an answer, complete or cancelled."""

    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why there is no answer."""

    code: str
    message: str


def step_of(call: ToolAsked | ToolAnswered) -> str:
    """Return a call of a tool as one line."""
    arguments = orjson.dumps(call.args).decode()
    return f"{call.tool} {arguments if len(arguments) <= _MOST else arguments[:_MOST] + '…'}"


class AppendOnlyStream:
    """Turn journal entries, one by one, into text that is only appended. The same entries give the same text.

    When a model call starts again, its new text is compared with the text that was sent, and only the rest is sent.
    Texts before and after a tool call are two paragraphs.

    whole: the answer is sent when it is complete, because its form is checked first.
    steps: calls of the agent's own tools are sent as lines of the thinking.
    """

    def __init__(self, *, whole: bool = False, steps: bool = False) -> None:
        self.model = ""
        self._whole = whole
        self._steps = steps
        self._state = EMPTY
        # By kind, for a model call that started again: its sent text, and how many characters of it are valid.
        self._sent: dict[Kind, tuple[str, int]] = {}
        self._any: set[Kind] = set()
        self._gap: set[Kind] = set()

    def take(self, entry: Entry) -> Iterator[TextDelta | Completed | Failed]:
        before, self._state = self._state, apply(self._state, entry)
        event = entry.event
        if event.speaker is not None:
            # Texts of committee members are not the answer.
            return
        match event:
            case events.Claimed():
                self.model = event.model or self.model
            case events.ThinkingPiece():
                yield from self._more("thinking", event.text)
            case events.AnswerPiece():
                yield from self._more("answer", event.text)
            case events.ModelMessage():
                self._sent.clear()
                self._gap = {kind for kind in self._any if kind == "thinking" or event.tool_calls}
            case events.ToolAsked() if self._steps:
                gap = "\n\n" if "thinking" in self._any else ""
                self._any.add("thinking")
                self._gap.add("thinking")
                yield TextDelta("thinking", gap + step_of(event))
            case events.Restarted():
                for kind, of in _KINDS.items():
                    sent, _ = self._sent.get(kind, (before.unfinished(of), 0))
                    self._sent[kind] = sent, len(self._state.unfinished(of))
            case events.Completed() | events.Cancelled():
                if "answer" not in self._any and event.answer:
                    yield TextDelta("answer", event.answer)
                yield Completed(events.shown(event))
            case events.Failed():
                yield Failed(event.code, event.message or "the query failed")
            case _:
                pass

    def _more(self, kind: Kind, text: str) -> Iterator[TextDelta]:
        if self._whole and kind == "answer":
            return
        text = self._new_suffix(kind) if kind in self._sent else text
        if not text:
            return
        if kind in self._gap:
            self._gap.discard(kind)
            text = f"\n\n{text}"
        self._any.add(kind)
        yield TextDelta(kind, text)

    def _new_suffix(self, kind: Kind) -> str:
        """Return the text of a call that started again as far as it was not sent yet."""
        sent, valid = self._sent[kind]
        text = self._state.unfinished(_KINDS[kind])
        if sent.startswith(text):
            return ""
        del self._sent[kind]
        if text.startswith(sent):
            return text[len(sent) :]
        return f"\n\n{text[valid:]}"
