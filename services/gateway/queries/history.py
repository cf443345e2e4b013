"""The history that a client sends, beside the turns that a session holds: what has to leave, and what to come. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.queries.prompt_wrappers import spoken, undressed
from shared.bus import order
from shared.contracts import ChatTurnMessage
from shared.records.sessions import Turn

# Turns that no query of ours wrote: their ids lie behind all ids that Redis gives in one millisecond.
_FIRST, _STEP = 1_000_000_000, 10_000
_HANDED = re.compile(r"call_(\d{1,15})_(\d{1,10})_\d{1,4}_\d{1,4}")


@dataclass(frozen=True, slots=True)
class Said:
    """A turn in a client's history. attachments: ids of the files in its question."""

    query: str
    answer: str
    attachments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """gone: ids of turns that leave a session. added: turns that it did not hold, oldest first."""

    gone: list[str] = field(default_factory=list)
    added: list[Turn] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.gone or self.added)


def turns_of(messages: Sequence[ChatTurnMessage]) -> list[Said]:
    """The turns of a history: each question with the last that was said to it.

    Instructions, calls of tools and their results do not count, nor does a question without an answer.
    """
    found: list[Said] = []
    query = answer = ""
    files: tuple[str, ...] = ()
    for message in messages:
        if message.role == "user":
            found += _turn(query, answer, files)
            query, answer, files = undressed(message.content)[1], "", tuple(dict.fromkeys(message.attachments or ()))
        elif message.role == "assistant" and not message.tool_calls and message.content.strip():
            answer = spoken(message.content)
    return [*found, *_turn(query, answer, files)]


def _turn(query: str, answer: str, files: tuple[str, ...]) -> list[Said]:
    return [Said(query, answer, files)] if query.strip() and answer.strip() else []


def queries_of(messages: Sequence[ChatTurnMessage]) -> set[str]:
    """Return the queries whose calls the client ran: their journals have the earlier steps."""
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    return {f"{match[1]}-{match[2]}" for one in ids if (match := _HANDED.fullmatch(one))}


def same(one: Turn | Said, other: Turn | Said) -> bool:
    """Return whether two turns have the same text, except for white space."""
    return normal(one.query) == normal(other.query) and normal(one.answer) == normal(other.answer)


def normal(text: str) -> str:
    return unicodedata.normalize("NFC", " ".join(text.split()))


def begins(held: Sequence[Turn], sent: Sequence[Said]) -> bool:
    """Return whether a session begins with all turns that a client sends."""
    return len(sent) <= len(held) and all(map(same, held, sent))


def change(held: Sequence[Turn], sent: Sequence[Said], now: int) -> Change:
    """Return the change that makes a session equal to its client's history. now: ms since the epoch.

    Equal turns at the beginning and at the end stay unchanged. New turns get ids before `now`.
    """
    shorter = min(len(held), len(sent))
    front = next((n for n in range(shorter) if not same(held[n], sent[n])), shorter)
    most = shorter - front
    back = next((n for n in range(most) if not same(held[-1 - n], sent[-1 - n])), most)
    while True:
        ids = _ids(held[:front], held[len(held) - back :], len(sent) - back - front, now)
        if ids is not None:
            break
        # There are too few ids between two turns: the later turns get new ids, too.
        back = 0
    gone = [turn.query_id for turn in held[front : len(held) - back]]
    new = sent[front : len(sent) - back]
    added = [
        Turn(i, said.query, said.answer, order(i)[0], attachments=tuple({"id": one} for one in said.attachments))
        for i, said in zip(ids, new, strict=True)
    ]
    return Change(gone, added)


def _ids(before: Sequence[Turn], after: Sequence[Turn], count: int, now: int) -> list[str] | None:
    """Return ids for `count` turns between others; None if there are too few."""
    following = order(after[0].query_id) if after else None
    if before:
        ms, number = order(before[-1].query_id)
    else:
        ms, number = max(0, (following[0] if following else now) - 1), 0
    number = max(number, _FIRST)
    step = 1 if following and following[0] == ms else _STEP
    ids = [(ms, number + step * n) for n in range(1, count + 1)]
    if ids and following and ids[-1] >= following:
        return None
    return [f"{ms}-{number}" for ms, number in ids]
