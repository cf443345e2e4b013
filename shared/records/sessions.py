"""Sessions: their owners and turns.

All turns of a respondent are members of one sorted set. Each member begins with its query's id: turns are in the order
of acceptance, and one read returns a page from any place. `shared.records.lanes` has the queues of unfinished queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import orjson

from shared.bus import Bus, Command, order
from shared.bus.keys import (
    cancel_key,
    deleted_key,
    session_key,
    steps_key,
    summary_key,
    turns_key,
    user_sessions_key,
)
from shared.bus.replies import Reply
from shared.contracts import FILES_ALONE, QUERY_RECEIVED
from shared.envelope import now_ms
from shared.errors import DecodeError
from shared.records.lanes import RESPONDENTS, number, padded, pairs
from shared.records.lua import script
from shared.telemetry.unread import not_understood

# The most turns of a page of a session, and of a prompt.
MAX_TURNS = 50
# The largest second part of an id here.
_LAST_NUMBER = 9_999_999_999
# Added to the score of a pinned session in its user's list, so that it is before all others.
_PINNED = 4_000_000_000_000_000
# Seconds for which a deletion is stored: a query may wait so long in a queue while the stack is stopped.
_DELETED_SECONDS = 7 * 86_400
# The reason of a cancellation.
_TAKEN_BACK = b"taken back"

_OPEN = script("open_session", "before", "deleted")

_APPEND = script("append_turn", "before", "deleted", "add_turn")


_CHANGE = script("change_session")
_NAME = script("name_session")

_BRING = script("replace_turns", "before", "deleted", "add_turn")


@dataclass(frozen=True, slots=True)
class Turn:
    """A query with its finished answer: clean text, no thinking. `time` is in ms since the epoch.

    interrupted: the user stopped the answer, and this is the part that had been written.
    ratio: characters per token, and image_tokens: tokens per image, if the model backend has counted them.
    attachments: the files of the question: `id`, and `name`, `type`, `size` and `pages` if they are known.
    noted: the query whose low grade the prompt of this turn names.
    after: the turn before this one is the newest that was not accepted after the query `after`; None: the turn before
    it in the session. So versions of an answer stand beside each other, and each has its own later turns.
    """

    query_id: str
    query: str
    answer: str
    time: int
    interrupted: bool = False
    ratio: float | None = None
    noted: str | None = None
    after: str | None = None
    attachments: Sequence[Mapping[str, Any]] = ()
    image_tokens: int | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the turn as the model reads it."""
        return [{"role": "user", "content": self.query}, {"role": "assistant", "content": self.answer}]

    @staticmethod
    def parse(value: Mapping[str, Any]) -> Turn:
        """Read a stored turn; fields of a newer release are ignored."""
        known = {item.name: value[item.name] for item in fields(Turn) if item.name in value}
        return Turn(**known | {"attachments": files_of(known.get("attachments"))})

    def dump(self) -> bytes:
        return orjson.dumps(
            {
                "query": self.query,
                "answer": self.answer,
                "time": self.time,
                "interrupted": self.interrupted,
                "ratio": self.ratio,
                **({"noted": self.noted} if self.noted else {}),
                **({"after": self.after} if self.after else {}),
                **({"attachments": self.attachments} if self.attachments else {}),
                **({"image_tokens": self.image_tokens} if self.image_tokens else {}),
            }
        )


def files_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the files in stored JSON; entries without an id are skipped."""
    found = value if isinstance(value, list) else ()
    return tuple(one for one in found if isinstance(one, dict) and isinstance(one.get("id"), str))


def words_of(query: str) -> str:
    """Return the text that the user wrote; empty for a message of files alone."""
    return "" if query == FILES_ALONE else query


def title_of(query: str, attachments: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the title of a session that begins with this query: the query's text, or the names of its files."""
    names = [str(file["name"]) for file in attachments or () if file.get("name")]
    return words_of(query) or ", ".join(names) or query


def shown(turns: Sequence[Turn], after: str | None = None) -> list[Turn]:
    """Return one conversation of a session, oldest turn first: the newest turn and, in turn, each one's predecessor.

    after: the conversation ends with the newest turn that was not accepted after this query.
    """
    found: list[Turn] = []
    bound = order(after) if after else None
    for turn in reversed(turns):
        if bound is None or order(turn.query_id) <= bound:
            found.append(turn)
            bound = order(turn.after) if turn.after else None
    return found[::-1]


def before(query_id: str) -> str:
    """Return the largest id smaller than this one."""
    ms, number = order(query_id)
    return f"{ms}-{number - 1}" if number else f"{max(0, ms - 1)}-{_LAST_NUMBER}"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of turns, oldest first. earlier: whether there are turns before them. total: the turns of the session."""

    turns: list[Turn]
    earlier: bool
    total: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The record of a session. Times are in ms since the epoch.

    title: the beginning of the first query, until the session is named. named: a user or a model has chosen the title.
    pinned: it is before the others in its user's list. settings: the user's settings of this chat, as the gateway has
    validated them. tip: the last turn of the conversation that the user has chosen among versions; empty: the newest.
    """

    session_id: str
    user_id: str
    title: str
    created: int
    updated: int
    pinned: bool = False
    named: bool = False
    tip: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(session_id: str, values: Mapping[str, str]) -> SessionInfo:
        return SessionInfo(
            session_id,
            values.get("user_id", ""),
            values.get("title", ""),
            number(values, "created"),
            number(values, "updated"),
            values.get("pinned") == "1",
            values.get("named") == "1",
            id_or_nothing(values.get("tip", "")),
            object_or_nothing(values.get("settings", "")),
        )


def id_or_nothing(text: str) -> str:
    """Return the text if it is a valid id, else an empty one."""
    try:
        order(text)
    except ValueError:
        return ""
    return text


def object_or_nothing(text: str) -> dict[str, Any]:
    """Return the object in a JSON text; an empty one if it is not an object."""
    try:
        value = orjson.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def deletion(session_id: str, query_id: str) -> Sequence[Command]:
    """Return the commands that read whether a query was taken back or its session deleted (see `was_deleted`)."""
    return ("GET", deleted_key(session_id)), ("GET", cancel_key(query_id))


def was_deleted(query_id: str, mark: Reply, cancelled: Reply) -> bool:
    """Return whether the query was taken back or deleted. mark, cancelled: the replies to `deletion`."""
    try:
        return cancelled == _TAKEN_BACK or (mark is not None and order(query_id) <= order(mark.decode()))
    except ValueError:
        return False


class Sessions:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    # ── ownership ────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, session_id: str, user_id: str, title: str, query_id: str = "") -> str | None:
        """Create the session if it is new; return its owner.

        query_id: the query for which it is opened. Returns None when the session was deleted after that query.
        """
        # One round trip in the usual case.
        raw, _ = await self._bus.link.pipe(self.opening(session_id, user_id, title, query_id))
        return await self.owner(raw, session_id, user_id)

    async def owner(self, raw: Reply, session_id: str, user_id: str) -> str | None:
        """Return the owner. raw: the first reply to `opening`."""
        owner = pairs(raw).get("user_id", "") if raw else None
        if owner != user_id:
            # `opening` has listed it for the wrong user.
            await self._bus.link.call("ZREM", user_sessions_key(user_id), session_id)
        return owner

    def opening(self, session_id: str, user_id: str, title: str, query_id: str = "") -> list[Command]:
        """Return the commands of `open`, to be sent together with others."""
        # A query that is answered late was not used now.
        now = order(query_id)[0] if query_id else now_ms()
        keys = (session_key(session_id), deleted_key(session_id))
        return [_OPEN(keys, user_id, title[:80], now, query_id), _listing(session_id, user_id, now)]

    def making(self, session_id: str, user_id: str, title: str) -> list[Command]:
        """Return the commands that create a session whose name is certainly new."""
        now = now_ms()
        made = ("user_id", user_id, "title", title[:80], "created", now, "updated", now)
        return [("HSET", session_key(session_id), *made), _listing(session_id, user_id, now)]

    async def info(self, session_id: str) -> SessionInfo | None:
        raw = await self._bus.link.call("HGETALL", session_key(session_id))
        if not raw:
            return None
        return SessionInfo.parse(session_id, pairs(raw))

    async def change(
        self,
        info: SessionInfo,
        *,
        title: str | None = None,
        pinned: bool | None = None,
        settings: Mapping[str, Any] | None = None,
        tip: str | None = None,
    ) -> SessionInfo:
        """Change a session and return it; arguments that are None change nothing. Raises KeyError if it is deleted."""
        values: dict[str, str] = {}
        if title is not None:
            values |= {"title": title, "named": "1"}
        if pinned is not None:
            values["pinned"] = "1" if pinned else "0"
        if settings is not None:
            values["settings"] = orjson.dumps(settings).decode()
        if tip is not None:
            values["tip"] = tip
        if not values:
            return info
        raw = await self._bus.link.call(
            *_CHANGE((session_key(info.session_id),), *(w for v in values.items() for w in v))
        )
        if not raw:
            raise KeyError(info.session_id)
        changed = SessionInfo.parse(info.session_id, pairs(raw))
        if pinned is not None:
            place = _PINNED + now_ms() if pinned else changed.updated
            # XX: a session that was deleted meanwhile must stay deleted.
            await self._bus.link.call("ZADD", user_sessions_key(info.user_id), "XX", place, info.session_id)
        return changed

    async def name(self, session_id: str, query_id: str, title: str) -> bool:
        """Name a session after one of its turns; return False if the user has named it or the turn was taken back."""
        keys = (session_key(session_id), turns_key(session_id, "A"))
        return bool(await self._bus.link.call(*_NAME(keys, f"{padded(query_id)} ", title)))

    async def of_user(self, user_id: str, limit: int, offset: int = 0) -> list[SessionInfo]:
        """Return a user's sessions: first the pinned ones, latest pinned first; then the others, latest used first."""
        ids = await self._bus.link.call("ZREVRANGE", user_sessions_key(user_id), offset, offset + limit - 1)
        found: list[SessionInfo] = []
        for session_id in ids:
            # Ignore members that are not valid session ids.
            try:
                info = await self.info(session_id.decode(errors="replace"))
            except DecodeError as exc:
                not_understood(user_sessions_key(user_id), session_id.decode(errors="replace"), str(exc))
                continue
            if info is not None and info.user_id == user_id:
                found.append(info)
        return found

    # ── deletion ─────────────────────────────────────────────────────────────────────────────────────────────

    async def close(self, session_id: str) -> None:
        """Refuse further writes for the session's queries that were accepted until now."""
        (stream,) = await self._bus.link.pipe_raw([("XINFO", "STREAM", QUERY_RECEIVED.stream)])
        if isinstance(stream, list):
            last = stream[stream.index(b"last-generated-id") + 1]
            # In a write of its own: a full Redis refuses this command, and would still run the removals.
            await self._bus.link.call("SET", deleted_key(session_id), last, "EX", _DELETED_SECONDS)

    async def delete(self, info: SessionInfo) -> None:
        """Close a session, then remove it and its turns."""
        session_id = info.session_id
        await self.close(session_id)
        turns = [turns_key(session_id, r) for r in RESPONDENTS]
        await self._bus.link.pipe(
            [
                ("UNLINK", session_key(session_id), summary_key(session_id), steps_key(session_id), *turns),
                ("ZREM", user_sessions_key(info.user_id), session_id),
            ]
        )

    async def take_back(self, query_ids: Sequence[str]) -> None:
        """Mark queries as taken back: participants that work on one find it `deleted`."""
        await self._bus.link.pipe([("SET", cancel_key(one), _TAKEN_BACK, "EX", _DELETED_SECONDS) for one in query_ids])

    async def deleted(self, session_id: str, query_id: str) -> bool:
        """Return whether a query was taken back or its session deleted.

        Participants call this after a write for a query, and remove the written data then.
        """
        return was_deleted(query_id, *await self._bus.link.pipe(deletion(session_id, query_id)))

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────

    async def turns(
        self,
        session_id: str,
        respondent_id: str,
        before: str | None = None,
        *,
        after: str | None = None,
        limit: int = MAX_TURNS,
        asked: Sequence[Reply] | None = None,
    ) -> list[Turn]:
        """Return the newest turns of one conversation (see `shown`), oldest first.

        before: only turns before this query; all turns if it is not a valid id. after: the last turn of the
        conversation, for a query without a turn. asked: the replies to `newest`.
        """
        found: list[Turn] = []
        place: str | None = None
        try:
            if before is not None:
                # Read from the query's own turn, if there is one: it names the turn before it.
                ms, number = order(before)
                place = f"{ms}-{number + 1}"
        except ValueError:
            before = None
        bound = order(after) if after else None
        while True:
            page = await self.page(session_id, respondent_id, limit + 1, place, asked=asked)
            asked = None
            for turn in reversed(page.turns):
                if bound is not None and order(turn.query_id) > bound:
                    continue
                if turn.query_id != before:
                    found.append(turn)
                bound = order(turn.after) if turn.after else None
                if len(found) == limit:
                    return found[::-1]
            if not page.earlier:
                return found[::-1]
            place = page.turns[0].query_id

    async def turn(self, session_id: str, respondent_id: str, query_id: str) -> Turn | None:
        """Return the turn of a query. Raises ValueError for a malformed id."""
        ms, number = order(query_id)
        page = await self.page(session_id, respondent_id, 1, f"{ms}-{number + 1}")
        return next((turn for turn in page.turns if turn.query_id == query_id), None)

    def newest(self, session_id: str, respondent_id: str) -> list[Command]:
        """Return the first commands of `turns`, to be sent together with others."""
        return _page(turns_key(session_id, respondent_id), "+", MAX_TURNS + 1)

    async def page(
        self,
        session_id: str,
        respondent_id: str,
        limit: int = MAX_TURNS,
        before: str | None = None,
        *,
        asked: Sequence[Reply] | None = None,
    ) -> Page:
        """Return the newest turns, or the newest before a query. Raises ValueError for a malformed id."""
        key = turns_key(session_id, respondent_id)
        start = "+" if before is None else f"({padded(before)}"
        members, total = asked or await self._bus.link.pipe(_page(key, start, limit))
        readable, last = kept(members), b""
        # Read on if unreadable members fill a page. Members with other scores are unordered: stop there.
        while len(readable) <= limit < len(members) and (not last or members[-1] < last):
            last = members[-1]
            (members, _) = await self._bus.link.pipe(_page(key, b"(" + last, limit))
            readable |= kept(members)
        newest = in_order(readable)[-limit - 1 :]
        return Page(newest[-limit:], len(newest) > limit, total)

    async def every_turn(self, session_id: str, respondent_id: str = "A") -> list[Turn]:
        """Return all turns of a session, oldest first."""
        return in_order(kept(await self._bus.link.call("ZRANGE", turns_key(session_id, respondent_id), 0, -1)))

    async def beginnings(self, user_id: str, limit: int) -> list[tuple[str, Turn]]:
        """Return the sessions that a user used last, newest first, each with its first turn; without empty ones."""
        ids = await self._bus.link.call("ZREVRANGE", user_sessions_key(user_id), 0, limit - 1)
        keys: dict[str, str] = {}
        for name in (raw.decode(errors="replace") for raw in ids):
            try:
                keys[name] = turns_key(name, "A")
            except DecodeError as exc:
                not_understood(user_sessions_key(user_id), name, str(exc))
        first = await self._bus.link.pipe([("ZRANGE", key, 0, 0) for key in keys.values()])
        return [(name, turn) for name, raw in zip(keys, first, strict=True) for turn in kept(raw).values()]

    async def bring(self, session_id: str, gone: Sequence[str], added: Sequence[Turn]) -> None:
        """Remove turns of both respondents and add turns of A, in one step; a repeat changes nothing."""
        words = [word for turn in added for word in (turn.query_id, turn.dump())]
        keys = [turns_key(session_id, r) for r in RESPONDENTS]
        await self._bus.link.call(
            *_BRING(
                (session_key(session_id), summary_key(session_id), steps_key(session_id), *keys),
                *(len(gone), *gone, *words),
            )
        )

    def appending(self, session_id: str, respondent_id: str, turn: Turn) -> list[Command]:
        """Return the command that stores a turn under its query's id: a repeat changes nothing."""
        keys = (session_key(session_id), turns_key(session_id, respondent_id), deleted_key(session_id))
        return [_APPEND(keys, turn.query_id, turn.dump(), now_ms(), int(respondent_id == "A"))]


def _listing(session_id: str, user_id: str, now: int) -> Command:
    # GT: a pinned session stays in front.
    return ("ZADD", user_sessions_key(user_id), "GT", now, session_id)


def _page(key: str, start: str | bytes, limit: int) -> list[Command]:
    """Return the commands that read members backwards from one, and their number. One more shows an earlier page."""
    return [("ZRANGE", key, start, "-", "BYLEX", "REV", "LIMIT", 0, limit + 1), ("ZCARD", key)]


def kept(members: Sequence[bytes]) -> dict[str, Turn]:
    """Return the turns of a sorted set by their queries' ids. Malformed members are skipped."""
    found: dict[str, Turn] = {}
    for member in members:
        try:
            place, value = member.split(b" ", 1)
            ms, _, seq = place.partition(b"-")
            turn = Turn.parse({"query_id": f"{int(ms)}-{int(seq)}", **orjson.loads(value)})
            found[turn.query_id] = turn
        except (ValueError, TypeError) as exc:
            # Log the kind of error, not the user's words.
            where = member.partition(b" ")[0][:40].decode(errors="replace")
            not_understood("the turns of a session", where, type(exc).__name__, member)
    return found


def in_order(found: Mapping[str, Turn]) -> list[Turn]:
    """Return the turns in the order of their queries' ids."""
    return [found[query_id] for query_id in sorted(found, key=order)]
