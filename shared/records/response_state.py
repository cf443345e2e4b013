"""The state of a response: its journal, reduced entry by entry. Pure.

The state has the parts of the response in the order of their first entries: runs of text, tool calls and all other
entries. Only this module decides which text a restart makes void and whose text an entry continues. It also decides
which text stands before a tool call, which call a result belongs to, and which entries may follow the terminal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, TypeVar

from shared.envelope import order
from shared.records.events import (
    LATE,
    AnswerPiece,
    CallEnded,
    Cancelled,
    Completed,
    Entry,
    EntryType,
    Failed,
    KnownEvent,
    ModelMessage,
    Restarted,
    Speaker,
    ThinkingPiece,
    ToolAnswered,
    ToolAsked,
    Unknown,
)

NO_ENTRY = "0-0"
Known = TypeVar("Known", bound=KnownEvent)


class Chunk(NamedTuple):
    """The text of one entry, behind the earlier text of its run: appending copies nothing."""

    id: str
    text: str
    before: Chunk | None


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one kind and speaker, with no other entry of the speaker in between.

    id: the first entry. after: the entry before it in the journal, of any speaker. said: the text stands before a tool
    call of its message. It is then no part of the answer, and a restart cannot make it void.
    """

    id: str
    kind: EntryType
    speaker: Speaker
    after: str
    last: Chunk
    said: bool = False

    @property
    def text(self) -> str:
        pieces: list[str] = []
        chunk: Chunk | None = self.last
        while chunk is not None:
            pieces.append(chunk.text)
            chunk = chunk.before
        return "".join(reversed(pieces))

    def until(self, valid: tuple[int, int]) -> Text | None:
        """Return the text of the entries up to this id; None if there is none."""
        chunk: Chunk | None = self.last
        while chunk is not None and order(chunk.id) > valid:
            chunk = chunk.before
        return None if chunk is None else self if chunk is self.last else replace(self, last=chunk)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call at the place of its request. token: see `Entry`."""

    id: str
    speaker: Speaker
    asked: ToolAsked | None
    answered: ToolAnswered | None
    token: str = ""

    @property
    def latest(self) -> ToolAsked | ToolAnswered:
        event = self.answered or self.asked
        assert event is not None
        return event


Part = Text | Call | Entry


@dataclass(frozen=True, slots=True)
class ResponseState:
    """The state after some entries. last: the id of the last entry. end: the terminal entry."""

    last: str = NO_ENTRY
    parts: tuple[Part, ...] = ()
    end: Entry | None = None

    def events(self, kind: type[Known]) -> Iterator[Known]:
        """Return all events of a type, oldest first; none for text and tool calls."""
        return (part.event for part in self.parts if isinstance(part, Entry) and isinstance(part.event, kind))

    def newest(self, kind: type[Known], where: Callable[[Known], bool] = lambda _: True) -> Known | None:
        """The newest event of a type for which `where` is true; of text and tool calls none."""
        for part in reversed(self.parts):
            if isinstance(part, Entry) and isinstance(part.event, kind) and where(part.event):
                return part.event
        return None

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    def token(self, call_id: str) -> str | None:
        """The token of a tool call; None if it was not requested."""
        return next((call.token for call in self.calls if call.asked and call.asked.call_id == call_id), None)

    def result(self, call_id: str) -> ToolAnswered | None:
        """The result of a tool call."""
        return next((call.answered for call in self.calls if call.answered and call.answered.call_id == call_id), None)

    @property
    def answer(self) -> str:
        """The answer's text so far, without text before a tool call."""
        return "".join(text.text for text in self.texts(EntryType.ANSWER) if not text.said)

    @property
    def thinking(self) -> str:
        """The thinking of the answer so far."""
        return "".join(text.text for text in self.texts(EntryType.THINKING))

    def unfinished(self, kind: EntryType) -> str:
        """Return the answer's text, or its thinking, after the last whole message."""
        found: list[str] = []
        for part in reversed(self.parts):
            if isinstance(part, Text) and part.kind is kind and part.speaker is None:
                found.append(part.text)
            elif isinstance(part, Entry) and isinstance(part.event, ModelMessage) and part.event.speaker is None:
                break
        return "".join(reversed(found))

    def texts(self, kind: EntryType) -> Iterator[Text]:
        """Return the answer's runs of text, or its thinking, also those before a tool call."""
        return (p for p in self.parts if isinstance(p, Text) and p.kind is kind and p.speaker is None)

    @property
    def unsettled(self) -> dict[Speaker, str]:
        """By speaker, the last entry before text that no whole message and no restart follows."""
        found: dict[Speaker, str] = {}
        for part in self.parts:
            if isinstance(part, Text):
                found.setdefault(part.speaker, part.after)
            elif isinstance(part, Entry) and isinstance(part.event, ModelMessage | Restarted):
                found.pop(part.event.speaker, None)
        return found

    @property
    def spent(self) -> dict[str, int]:
        """Tokens of all whole messages, as far as the server counted them. Members of a committee are included."""
        messages = list(self.events(ModelMessage))
        return {
            "prompt_tokens": sum(message.prompt_tokens or 0 for message in messages),
            "completion_tokens": sum(message.completion_tokens or 0 for message in messages),
        }

    @property
    def ended_calls(self) -> list[CallEnded]:
        """The calls of a completed answer. A large result is taken from its own entry; a lost one keeps `result_in`."""
        if self.end is None or not isinstance(self.end.event, Completed):
            return []
        answered = {call.latest.call_id: call.answered for call in self.calls}
        return [_whole(call, answered.get(call.call_id)) for call in self.end.event.tool_calls]


EMPTY = ResponseState()


def _whole(call: CallEnded, answered: ToolAnswered | None) -> CallEnded:
    if not call.result_in or answered is None:
        return call
    return call.model_copy(update={"result": answered.result, "data": answered.data, "result_in": ""})


def replay(entries: Iterable[Entry]) -> ResponseState:
    """Return the state after these entries, oldest first."""
    return reduce(apply, entries, EMPTY)


def apply(state: ResponseState, entry: Entry) -> ResponseState:
    """Return the state after one more entry. After the terminal entry only late ones count."""
    event = entry.event
    if isinstance(event, Unknown) or (state.end is not None and event.type not in LATE):
        return replace(state, last=entry.id)
    parts, end = state.parts, state.end
    match event:
        case ThinkingPiece() | AnswerPiece():
            parts = _with_piece(state, entry, event)
        case ToolAsked():
            parts = (*parts, Call(entry.id, event.speaker, event, None, entry.token))
        case ToolAnswered():
            parts = _with_result(parts, entry, event)
        case Restarted():
            parts = (*_without_void(parts, event, entry.id), entry)
        case ModelMessage(tool_calls=[_, *_]):
            parts = (*_said(parts, event.speaker), entry)
        case Completed() | Failed() | Cancelled():
            parts, end = (*parts, entry), entry
        case _:
            parts = (*parts, entry)
    return ResponseState(entry.id, parts, end)


def _speaker(part: Part) -> Speaker:
    return part.event.speaker if isinstance(part, Entry) else part.speaker


def _with_piece(state: ResponseState, entry: Entry, event: ThinkingPiece | AnswerPiece) -> tuple[Part, ...]:
    speaker, parts = event.speaker, state.parts
    # Members of a committee may speak at once: the speaker's last part is nearly always among the last ones.
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        if _speaker(part) == speaker:
            if isinstance(part, Text) and part.kind is event.type:
                text = Text(part.id, part.kind, speaker, part.after, Chunk(entry.id, event.text, part.last), part.said)
                return (*parts[:place], text, *parts[place + 1 :])
            break
    return (*parts, Text(entry.id, event.type, speaker, state.last, Chunk(entry.id, event.text, None)))


def _with_result(parts: tuple[Part, ...], entry: Entry, event: ToolAnswered) -> tuple[Part, ...]:
    for place, part in enumerate(parts):
        if isinstance(part, Call) and part.latest.call_id == event.call_id:
            return (*parts[:place], replace(part, answered=event), *parts[place + 1 :])
    return (*parts, Call(entry.id, event.speaker, None, event))


def _without_void(parts: tuple[Part, ...], event: Restarted, entry_id: str) -> Iterator[Part]:
    try:
        valid = order(event.discard_after)
    except ValueError:
        valid = order(entry_id)
    for part in parts:
        if isinstance(part, Text) and part.speaker == event.speaker and not part.said:
            if (left := part.until(valid)) is not None:
                yield left
        else:
            yield part


def _said(parts: tuple[Part, ...], speaker: Speaker) -> Iterator[Part]:
    for part in parts:
        ours = isinstance(part, Text) and part.speaker == speaker and not part.said
        yield replace(part, said=True) if ours and isinstance(part, Text) else part
