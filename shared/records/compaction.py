"""The compacted record of a response, which its session stores: bounded, and without repeated text. Pure.

Its events have the ids, types and order of the journal's entries, so that a client shows both in the same way. The
answer's text is in the session's turn only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from shared.bus import order
from shared.records.events import TERMINAL, Claimed, EntryType, KnownEvent, ModelMessage, Speaker, shown
from shared.records.response_state import Call, Part, ResponseState, Text

# Bytes of one query's events.
MOST_BYTES = 65_536
# Characters of an answer that differs from its turn's.
_MOST_ANSWER = 16_000
# Characters of a text and items of a list that stay: the first pair that makes the record small enough.
_LIMITS = ((16_000, 200), (4_000, 50), (1_000, 20), (250, 10), (60, 3))
# The fields that stay; other types keep all fields.
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


def compacted(state: ResponseState, answer: str | None = None) -> list[Event]:
    """Return the events of a response, oldest first. answer: the text in the session's turn, which is not repeated."""
    claims = [part.id for part in state.parts if _is_claim(part)]
    found = []
    for part in state.parts:
        match part:
            case Text(kind=EntryType.ANSWER, speaker=None, said=False) if answer is not None:
                pass
            case Text():
                found.append((part.id, part.kind.value, {"text": part.text, **_labels(part.speaker)}))
            case Call():
                found.append((part.id, part.latest.type.value, shown(part.latest)))
            case _ if not _is_claim(part) or part.id == claims[-1]:
                assert not isinstance(part.event, tuple)
                found.append((part.id, part.event.type.value, _data(part.event, answer)))
    return found


def _is_claim(part: Part) -> bool:
    return not isinstance(part, Text | Call) and isinstance(part.event, Claimed)


def _labels(speaker: Speaker) -> dict[str, Any]:
    return {"persona": speaker[0], "round": speaker[1]} if speaker else {}


def _data(event: KnownEvent, answer: str | None) -> dict[str, Any]:
    data, fewer = shown(event), _FEWER.get(event.type)
    if fewer is not None:
        data = {name: data[name] for name in fewer if name in data}
    if isinstance(event, ModelMessage):
        data |= {"content": "", "tool_calls": [{"name": call.name} for call in event.tool_calls]}
    said = data.get("answer", "")
    if answer is not None and event.type in TERMINAL and (said == answer or len(said) > _MOST_ANSWER):
        data.pop("answer", None)
    return data


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def bounded(events: Sequence[Event], most: int = MOST_BYTES) -> bytes:
    """Return the record as JSON of at most `most` bytes.

    Long texts are cut to the same length, and end with a note. If that is not enough, events before the last are
    removed.
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
    """Read a record that `bounded` has written. Raises ValueError."""
    try:
        value = orjson.loads(record)
        events = [(str(one), str(kind), dict(data)) for one, kind, data in value["events"]]
        for entry_id, *_ in events:
            order(entry_id)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"no record of a journal: {exc!r}") from exc
    return events
