"""A journal for clients that can only append text: OpenAI's streams. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from shared.bus import order
from shared.records.journal import EntryType, JournalEntry

Kind = Literal["thinking", "answer"]
# Characters of a call's arguments that a line shows.
_MOST = 200


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the thinking or of the answer."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Completed:
    """The value of the terminal entry of an answer, complete or cancelled."""

    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no answer."""

    code: str
    message: str


def step_of(entry: JournalEntry) -> str:
    """A call of a tool in one line."""
    value = entry.value()
    arguments = orjson.dumps(value.get("args") or {}).decode()
    return f"{value.get('tool')} {arguments if len(arguments) <= _MOST else arguments[:_MOST] + '…'}"


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
        self._told: list[tuple[tuple[int, int], Kind, str]] = []
        self._replayed: dict[str, str] = {}
        self._again: dict[str, str] = {}
        self._any: set[Kind] = set()
        self._gap: set[Kind] = set()

    def take(self, entry: JournalEntry) -> Iterator[TextDelta | Completed | Failed]:
        if b'"persona"' in entry.data and "persona" in entry.value():
            # what the committee says among itself is not the answer
            return
        match entry.type:
            case EntryType.CLAIMED:
                self.model = entry.value().get("model") or self.model
            case EntryType.THINKING:
                yield from self._more("thinking", entry)
            case EntryType.ANSWER:
                yield from self._more("answer", entry)
            case EntryType.MESSAGE:
                self._told.clear()
                self._replayed.clear()
                called = bool(entry.value().get("tool_calls"))
                self._gap = {kind for kind in self._any if kind == "thinking" or called}
            case EntryType.TOOL_REQUEST if self._steps:
                before = "\n\n" if "thinking" in self._any else ""
                self._any.add("thinking")
                self._gap.add("thinking")
                yield TextDelta("thinking", before + step_of(entry))
            case EntryType.RESTARTED:
                self._restart(entry.valid_until())
            case EntryType.COMPLETED | EntryType.CANCELLED:
                value = entry.value()
                if "answer" not in self._any and (text := str(value.get("answer") or "")):
                    yield TextDelta("answer", text)
                yield Completed(value)
            case EntryType.FAILED:
                value = entry.value()
                yield Failed(str(value.get("code", "internal")), str(value.get("message", "the query failed")))
            case _:
                pass

    def _more(self, kind: Kind, entry: JournalEntry) -> Iterator[TextDelta]:
        text = entry.text()
        self._told.append((order(entry.id), kind, text))
        text = self._new_suffix(kind, text)
        if not text or (self._whole and kind == "answer"):
            return
        if kind in self._gap:
            self._gap.discard(kind)
            text = f"\n\n{text}"
        self._any.add(kind)
        yield TextDelta(kind, text)

    def _restart(self, after: tuple[int, int]) -> None:
        self._again.clear()
        kinds: tuple[Kind, ...] = ("thinking", "answer")
        self._replayed = {
            kind: "".join(text for at, of, text in self._told if of == kind and at > after) for kind in kinds
        }
        self._told = [told for told in self._told if told[0] <= after]

    def _new_suffix(self, kind: Kind, text: str) -> str:
        """Return the part of a text that was not sent yet."""
        known = self._replayed.get(kind, "")
        if not known:
            return text
        said = self._again.get(kind, "") + text
        self._again[kind] = said
        if known.startswith(said):
            return ""
        self._replayed[kind] = ""
        return said[len(known) :] if said.startswith(known) else f"\n\n{said}"
