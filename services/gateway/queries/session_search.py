"""Words in a user's sessions: titles, questions and answers, the session used last first.

Nothing is indexed: what a person has said fits into a few reads, deleting needs no second place, and a session is
found the moment it is there. Hence there are bounds, and the answer says when they were reached.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.http.gateway import Gateway
from shared.records.sessions import SessionInfo, Turn
from shared.records.sessions import words_of as written

# Sessions whose titles and turns are read for one search, and characters of turns.
MOST_SESSIONS = 1_000
_MOST_CHARS = 20_000_000
_PAGE = 20
_AROUND = 60
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Match:
    """A session that has the words; `excerpt` of the turn of that query, empty when the title has them all."""

    info: SessionInfo
    query_id: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Found:
    """complete: no session of the user's was left out."""

    matches: list[Match]
    complete: bool


def words_of(text: str) -> list[str]:
    """What is looked for, each anywhere in a text, without regard to case."""
    return list(dict.fromkeys(_folded(text).split()))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def has_all(text: str, words: Sequence[str]) -> bool:
    folded = _folded(text)
    return all(word in folded for word in words)


def excerpt(text: str, words: Sequence[str]) -> str:
    """The place of the first word with what stands around it, on one line."""
    line = " ".join(text.split())
    folded = _folded(line)
    at = min((place for word in words if (place := folded.find(word)) >= 0), default=0)
    # folding may change lengths a little: the place is near enough
    start = max(0, min(at, len(line)) - _AROUND)
    piece = line[start : start + _SHOWN]
    return f"{'…' if start else ''}{piece}{'…' if start + _SHOWN < len(line) else ''}"


def match(info: SessionInfo, turns: Sequence[Turn], words: Sequence[str]) -> Match | None:
    """The newest turn that has all the words, unless the title has."""
    if has_all(info.title, words):
        return Match(info, "", "")
    for turn in reversed(turns):
        text = f"{written(turn.query)}\n{turn.answer}"
        if has_all(f"{info.title}\n{text}", words):
            return Match(info, turn.query_id, excerpt(text, words))
    return None


async def find(gateway: Gateway, user_id: str, text: str, limit: int) -> Found:
    """At most `limit` sessions with all the words of a text in the title or in one turn."""
    words = words_of(text)
    matches: list[Match] = []
    read = 0
    for offset in range(0, MOST_SESSIONS, _PAGE):
        infos = await gateway.sessions.of_user(user_id, _PAGE, offset)
        for info in infos:
            turns = [] if has_all(info.title, words) else await gateway.sessions.every_turn(info.session_id)
            # a long session is read by itself, and others are served meanwhile
            found = await asyncio.to_thread(match, info, turns, words) if turns else match(info, turns, words)
            read += sum(len(turn.query) + len(turn.answer) for turn in turns)
            if found is not None:
                matches.append(found)
            if len(matches) == limit or read > _MOST_CHARS:
                return Found(matches, complete=False)
        if not infos:
            return Found(matches, complete=True)
    return Found(matches, complete=not await gateway.sessions.of_user(user_id, 1, MOST_SESSIONS))
