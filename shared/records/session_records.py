"""Whole sessions as records, for backups and imports: read in one step; a repeated write changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from shared.bus import Bus, Command
from shared.bus.keys import session_key, steps_key, turns_key, user_sessions_key
from shared.contracts import RespondentId
from shared.records.lanes import RESPONDENTS, number, pairs
from shared.records.lua import script
from shared.records.sessions import MAX_TURNS, id_or_nothing, in_order, kept, object_or_nothing
from shared.telemetry.unread import not_understood

SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}$"
QUERY_ID = r"^[0-9]{1,15}-[0-9]{1,10}$"
_STEP = r"^[0-9]{1,15}-[0-9]{1,10}( (critique|pairwise|reward|unanswered))?$"
_FEW = ("noted", "after", "attachments", "image_tokens")

_READ = script("read_session")

_WRITE = script("import_session", "add_turn")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(_Model):
    """A file of a question. The file itself is in the library of its user, or was deleted."""

    id: str = Field(min_length=1, max_length=200)
    name: str | None = None
    type: str | None = None
    size: int | None = Field(default=None, ge=0)
    pages: int | None = Field(default=None, ge=1)


class TurnRecord(_Model):
    """A turn as `shared.records.sessions.Turn` has it."""

    query_id: str = Field(pattern=QUERY_ID)
    query: str
    answer: str
    time: int = Field(ge=0)
    interrupted: bool = False
    ratio: float | None = Field(default=None, allow_inf_nan=False)
    noted: str | None = Field(default=None, pattern=QUERY_ID)
    after: str | None = Field(default=None, pattern=QUERY_ID)
    attachments: list[FileRecord] = []
    image_tokens: int | None = Field(default=None, ge=1)


class SessionRecord(_Model):
    """A session. Times are in ms since the epoch.

    used: its score in the user's list. tip: the turn that its user has chosen. steps: the records of its queries, as
    `shared.records.steps` stores them.
    """

    session_id: str = Field(pattern=SESSION_ID)
    user_id: str = Field(min_length=1, max_length=200)
    title: str
    created: int = Field(ge=0)
    updated: int = Field(ge=0)
    used: int = Field(ge=0)
    pinned: bool = False
    settings: dict[str, Any] | None = None
    tip: str | None = Field(default=None, pattern=QUERY_ID)
    steps: dict[Annotated[str, Field(pattern=_STEP)], Any] = Field(default={})
    turns: dict[RespondentId, list[TurnRecord]]


def _keys(session_id: str) -> list[str]:
    return [session_key(session_id), *(turns_key(session_id, r) for r in RESPONDENTS), steps_key(session_id)]


async def session_ids(bus: Bus) -> AsyncIterator[list[str]]:
    """Yield pages of the ids of all sessions. An id may come twice."""
    async for keys in bus.scan(session_key.glob):
        yield [parts[0] for key in keys if (parts := session_key.parts(key.decode(errors="replace"))) is not None]


async def read_sessions(bus: Bus, ids: Sequence[str]) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the sessions as records, in pages. A long session has several records, each with its next turns.

    A session that was deleted meanwhile is left out.
    """
    wanted = {session_id: [b"-" for _ in RESPONDENTS] for session_id in dict.fromkeys(ids)}
    while wanted:
        raw = await bus.link.pipe([_READ(_keys(one), MAX_TURNS, *after) for one, after in wanted.items()])
        found: list[dict[str, Any]] = []
        going_on: dict[str, list[bytes]] = {}
        for session_id, (info, *pages, steps) in zip(wanted, raw, strict=True):
            if not info:
                continue
            found.append(_record(session_id, pairs(info), pages, steps))
            if any(len(page) == MAX_TURNS for page in pages):
                going_on[session_id] = [_after(page[-1]) if page else b"+" for page in pages]
        places = await bus.link.pipe([("ZSCORE", user_sessions_key(r["user_id"]), r["session_id"]) for r in found])
        for record, place in zip(found, places, strict=True):
            record["used"] = int(float(place)) if place is not None else record["updated"]
        yield found
        wanted = going_on


def _record(session_id: str, info: dict[str, str], pages: Sequence[Any], steps: Sequence[bytes]) -> dict[str, Any]:
    turns = {}
    for respondent, page in zip(RESPONDENTS, pages, strict=True):
        if found := kept(page):
            turns[respondent] = [
                _said({**asdict(turn), "attachments": list(turn.attachments)}) for turn in in_order(found)
            ]
    return {
        "session_id": session_id,
        "user_id": info.get("user_id", ""),
        "title": info.get("title", ""),
        "created": number(info, "created"),
        "updated": number(info, "updated"),
        **({"pinned": True} if info.get("pinned") == "1" else {}),
        **({"settings": settings} if (settings := object_or_nothing(info.get("settings", ""))) else {}),
        **({"tip": tip} if (tip := id_or_nothing(info.get("tip", ""))) else {}),
        **({"steps": told} if (told := _told(steps)) else {}),
        "turns": turns,
    }


def _said(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without its empty optional fields."""
    return {name: value for name, value in turn.items() if value or name not in _FEW}


def _told(steps: Sequence[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in zip(steps[::2], steps[1::2], strict=True):
        try:
            found[name.decode()] = orjson.loads(value)
        except ValueError as exc:
            not_understood("the steps of a session", repr(name), type(exc).__name__, value)
    return found


def _after(member: bytes) -> bytes:
    """Return the lower bound of the turns after this member, which may be malformed."""
    return b"(" + member.partition(b" ")[0] + b"!"


async def write_sessions(bus: Bus, records: Sequence[SessionRecord]) -> list[int]:
    """Add missing turns; return their number per session, or -1 for another user's session."""
    added: list[int] = await bus.link.pipe([_writing(record) for record in records])
    # After the session itself: users would not see an entry of the list without a session.
    listed = [
        ("ZADD", user_sessions_key(record.user_id), "GT", record.used, record.session_id)
        for record, number in zip(records, added, strict=True)
        if number >= 0
    ]
    if listed:
        await bus.link.pipe(listed)
    return added


def _writing(record: SessionRecord) -> Command:
    parts: list[Any] = [record.user_id, record.title, record.created, record.updated, int(record.pinned)]
    parts += [orjson.dumps(record.settings) if record.settings else "", record.tip or ""]
    parts += [
        len(record.steps),
        *(part for name, value in record.steps.items() for part in (name, orjson.dumps(value))),
    ]
    for respondent in RESPONDENTS:
        turns = record.turns.get(respondent, [])
        parts.append(len(turns))
        for turn in turns:
            parts += [
                turn.query_id,
                orjson.dumps(
                    _said(
                        turn.model_dump(exclude={"query_id"})
                        | {"attachments": [one.model_dump(exclude_none=True) for one in turn.attachments]}
                    )
                ),
            ]
    return _WRITE(_keys(record.session_id), *parts)
