"""A journal as it is kept with its session: pieces of text joined, what is said twice said once, and bounded. Pure.

Its events are the journal's own, with their ids and types, and tell in the same order what happened: whoever can show a
journal can show this. What an answer says is left to its turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from shared.bus import order
from shared.records.journal import LATE, TERMINAL, EntryType, JournalEntry

# Bytes of one query's events.
MOST_BYTES = 65_536
# Characters of an answer that differs from its turn's.
_MOST_ANSWER = 16_000
# Characters of a text and items of a list that stay, tried one after the other until the whole is small enough.
_LIMITS = ((16_000, 200), (4_000, 50), (1_000, 20), (250, 10), (60, 3))
_PIECES = frozenset({EntryType.THINKING, EntryType.ANSWER})
_WHOLE = frozenset({EntryType.STATE, EntryType.NOTICE, EntryType.RESTARTED, EntryType.CONTEXT_TRUNCATED,
                    EntryType.TOOL_REQUEST, EntryType.CRITIQUE, EntryType.PAIRWISE, EntryType.REWARD})  # fmt: skip
_FEWER = {
    EntryType.CLAIMED: ("query_id", "session_id", "model", "attachments"),
    EntryType.MESSAGE: ("step", "role", "persona", "round", "prompt_tokens", "completion_tokens", "finish_reason",
                        "model"),
    EntryType.PERSONA_WORKING: ("persona", "round"),
    EntryType.PERSONA_DONE: ("persona", "round"),
    EntryType.COMPLETED: ("answer", "usage", "finish_reason", "model", "client_calls"),
    EntryType.FAILED: ("code", "message", "usage"),
    EntryType.CANCELLED: ("answer", "usage"),
}  # fmt: skip

Event = tuple[str, str, dict[str, Any]]
Scope = tuple[str, int]


@dataclass(slots=True)
class _Told:
    """`pieces` of text with their ids, or `data`. said: no part of the answer, but what was said before a call."""

    id: str
    kind: EntryType
    scope: Scope
    data: dict[str, Any]
    pieces: list[tuple[str, str]] = field(default_factory=list)
    said: bool = False

    def event(self) -> Event:
        if self.kind not in _PIECES:
            return self.id, self.kind.value, self.data
        return self.id, self.kind.value, {"text": "".join(text for _, text in self.pieces), **self.data}


class Folding:
    """Takes the entries of a journal as they are written, oldest first."""

    def __init__(self, entries: Iterable[JournalEntry] = ()) -> None:
        self._told: list[_Told] = []
        self._last: dict[Scope, _Told] = {}
        self._calls: dict[str, _Told] = {}
        self._over = False
        for entry in entries:
            self.add(entry.id, entry.type, entry.value())

    def add(self, entry_id: str, kind: EntryType | str, data: Mapping[str, Any]) -> None:
        """What has not the form of a journal's entry is left out, and behind the end all but what others add."""
        if self._over and kind not in LATE:
            return
        self._over = self._over or kind in TERMINAL
        scope = _scope(data)
        if kind in _PIECES:
            self._piece(entry_id, EntryType(kind), scope, data)
        elif kind is EntryType.TOOL_RESULT and (call := self._calls.get(str(data.get("call_id")))) is not None:
            # in the place of what was asked
            call.kind, call.data = EntryType.TOOL_RESULT, dict(data)
        elif isinstance(kind, EntryType):
            self._whole(entry_id, kind, scope, data)

    def _piece(self, entry_id: str, kind: EntryType, scope: Scope, data: Mapping[str, Any]) -> None:
        text = data.get("text")
        if not isinstance(text, str):
            return
        told = self._last.get(scope)
        if told is None or told.kind is not kind:
            told = self._put(_Told(entry_id, kind, scope, _labels(scope)))
        told.pieces.append((entry_id, text))

    def _whole(self, entry_id: str, kind: EntryType, scope: Scope, data: Mapping[str, Any]) -> None:
        if kind is EntryType.RESTARTED:
            self._discard(scope, JournalEntry(entry_id, kind, 0, orjson.dumps(dict(data))).valid_until())
        fewer = _FEWER.get(kind)
        kept = dict(data) if fewer is None else {name: data[name] for name in fewer if name in data}
        if kind is EntryType.MESSAGE:
            kept["content"] = ""
            kept["tool_calls"] = [{"name": call.get("name")} for call in _objects(data.get("tool_calls"))]
            if kept["tool_calls"]:
                for told in self._told:
                    told.said = told.said or told.scope == scope
        if kind is EntryType.CLAIMED:
            # who was at work before is over
            self._told = [told for told in self._told if told.kind is not EntryType.CLAIMED]
        told = self._put(_Told(entry_id, kind, scope, kept))
        if kind is EntryType.TOOL_REQUEST:
            self._calls[str(data.get("call_id"))] = told

    def _put(self, told: _Told) -> _Told:
        self._told.append(told)
        self._last[told.scope] = told
        return told

    def _discard(self, scope: Scope, valid: tuple[int, int]) -> None:
        for told in self._told:
            if told.scope == scope and told.kind in _PIECES and not told.said:
                told.pieces = [piece for piece in told.pieces if order(piece[0]) <= valid]
        self._told = [told for told in self._told if told.kind not in _PIECES or told.pieces]

    def events(self, answer: str | None = None) -> list[Event]:
        """All of it, oldest first. answer: of the turn that is kept; it is not said a second time."""
        if answer is None:
            return [told.event() for told in self._told]
        found = [told.event() for told in self._told if not _of_the_answer(told)]
        return [(one, kind, _without(data, answer) if kind in TERMINAL else data) for one, kind, data in found]


def _without(data: dict[str, Any], answer: str) -> dict[str, Any]:
    said = data.get("answer")
    known = said == answer or not isinstance(said, str) or len(said) > _MOST_ANSWER
    return {name: value for name, value in data.items() if not (known and name == "answer")}


def _scope(data: Mapping[str, Any]) -> Scope:
    """Whose entry it is: a committee member's in a round, or that of who answers."""
    persona, number = data.get("persona"), data.get("round")
    return (persona, number if isinstance(number, int) else 0) if isinstance(persona, str) and persona else ("", 0)


def _labels(scope: Scope) -> dict[str, Any]:
    return {"persona": scope[0], "round": scope[1]} if scope[0] else {}


def _of_the_answer(told: _Told) -> bool:
    return told.kind is EntryType.ANSWER and told.scope == ("", 0) and not told.said


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def bounded(events: Sequence[Event], most: int = MOST_BYTES) -> bytes:
    """The record that is kept, as JSON; at most so many bytes.

    What is too long is cut, everywhere to the same length, and says so. What is still too much leaves, but the end.
    """
    record = _dump(events)
    for characters, items in _LIMITS:
        if len(record) <= most:
            return record
        record = _dump([(*one[:2], _cut(one[2], characters, items)) for one in events])
    characters, items = _LIMITS[-1]
    kept = [(*one[:2], _cut(one[2], characters, items)) for one in events]
    while len(record) > most and len(kept) > 1:
        kept = [*kept[: (len(kept) - 1) // 2], kept[-1]]
        record = _dump(kept)
    return record


def _dump(events: Sequence[Event]) -> bytes:
    return orjson.dumps({"events": events}, option=orjson.OPT_NON_STR_KEYS)


def _cut(value: Any, characters: int, items: int) -> Any:
    match value:
        case str() if len(value) > characters:
            return f"{value[:characters]}… ({len(value) - characters:,} characters more are not kept)"
        case dict():
            return {name: _cut(one, characters, items) for name, one in list(value.items())[: 10 * items]}
        case list():
            return [_cut(one, characters, items) for one in value[:items]]
    return value


def parse(record: bytes) -> list[Event]:
    """What `bounded` has written. Raises ValueError."""
    try:
        value = orjson.loads(record)
        events = [(str(one), str(kind), dict(data)) for one, kind, data in value["events"]]
        for entry_id, *_ in events:
            order(entry_id)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"no record of a journal: {exc!r}") from exc
    return events
