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

# What is shown of a session at once, and the most that a model is shown.
MAX_TURNS = 50
# The largest that an id's second part is here.
_LAST_NUMBER = 9_999_999_999
# Added to the place of a pinned session in its user's list: it stands before all that were used since.
_PINNED = 4_000_000_000_000_000
# A query that waited in a queue for longer than this, while everything was off, is not known as deleted any more.
_DELETED_SECONDS = 7 * 86_400
# Why a query is cancelled.
_TAKEN_BACK = b"taken back"

_OPEN = script("open_session", "before", "deleted")

_APPEND = script("append_turn", "before", "deleted", "add_turn")


_CHANGE = script("change_session")
_NAME = script("name_session")

_BRING = script("replace_turns", "before", "deleted", "add_turn")


@dataclass(frozen=True, slots=True)
class Turn:
    """A query with its finished answer: clean text, no thinking. `time` is in ms since the epoch.

    `interrupted`: the user stopped the answer, and this is the part that had been written.
    `ratio`: characters per token as the model backend counted this conversation, where it did.
    `image_tokens`: tokens per image, as the model backend counted them, where it did.
    `attachments`: the files of the question: `id`, and `name`, `type`, `size` and `pages` where they are known.
    `noted`: the query of whose low grade the model was told in this turn.
    `after`: the turn before it is the newest that was not accepted after this query; None: the one before it in the
    session. So versions of an answer stand beside each other, and each has what was said behind it.
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
        """The turn as the model sees it."""
        return [{"role": "user", "content": self.query}, {"role": "assistant", "content": self.answer}]

    @staticmethod
    def parse(value: Mapping[str, Any]) -> Turn:
        """What is not known (it is a newer version's) is left out."""
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
    """One conversation of a session: the turns, oldest first, of which each is the one before the next, up to the
    newest; or up to the newest that was not accepted after the query `after`."""
    found: list[Turn] = []
    bound = order(after) if after else None
    for turn in reversed(turns):
        if bound is None or order(turn.query_id) <= bound:
            found.append(turn)
            bound = order(turn.after) if turn.after else None
    return found[::-1]


def before(query_id: str) -> str:
    """The id that is before this one and after all others that are."""
    ms, number = order(query_id)
    return f"{ms}-{number - 1}" if number else f"{max(0, ms - 1)}-{_LAST_NUMBER}"


@dataclass(frozen=True, slots=True)
class Page:
    """`turns`, oldest first; `earlier`: there are turns before them; `total`: how many the session has."""

    turns: list[Turn]
    earlier: bool
    total: int


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """`title`: the beginning of the first query until it is given another; times are in ms since the epoch.

    pinned: it stands before the others in its user's list. named: the title was given, by its user or by a model.
    settings: how its user wants it to be asked, as the gateway has checked it.
    tip: the turn at the end of the conversation that its user has chosen among versions; empty: the newest turn.
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
    """An id of a query; empty where it is none."""
    try:
        order(text)
    except ValueError:
        return ""
    return text


def object_or_nothing(text: str) -> dict[str, Any]:
    """An object as JSON; empty where it is none."""
    try:
        value = orjson.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def deletion(session_id: str, query_id: str) -> Sequence[Command]:
    """Asks whether a query was taken back, or its session deleted; see `was_deleted`."""
    return ("GET", deleted_key(session_id)), ("GET", cancel_key(query_id))


def was_deleted(query_id: str, mark: Reply, cancelled: Reply) -> bool:
    """Whether it was, of what `deletion` was answered."""
    try:
        return cancelled == _TAKEN_BACK or (mark is not None and order(query_id) <= order(mark.decode()))
    except ValueError:
        return False


class Sessions:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    # ── ownership ────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, session_id: str, user_id: str, title: str, query_id: str = "") -> str | None:
        """Makes the session if it is new; returns the user who owns it.

        query_id: for whom it is opened; None when that query's session was deleted, and there is no other.
        """
        # one round trip for the usual case
        raw, _ = await self._bus.link.pipe(self.opening(session_id, user_id, title, query_id))
        return await self.owner(raw, session_id, user_id)

    async def owner(self, raw: Reply, session_id: str, user_id: str) -> str | None:
        """The same, of what `opening` was answered first."""
        owner = pairs(raw).get("user_id", "") if raw else None
        if owner != user_id:
            # it is taken out again, and never listed
            await self._bus.link.call("ZREM", user_sessions_key(user_id), session_id)
        return owner

    def opening(self, session_id: str, user_id: str, title: str, query_id: str = "") -> list[Command]:
        """What `open` asks, to be sent together with others."""
        # whoever comes late does not use it now
        now = order(query_id)[0] if query_id else now_ms()
        keys = (session_key(session_id), deleted_key(session_id))
        return [_OPEN(keys, user_id, title[:80], now, query_id), _listing(session_id, user_id, now)]

    def making(self, session_id: str, user_id: str, title: str) -> list[Command]:
        """Makes a session whose name is new for certain, together with other things."""
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
        """The session with another title, pinned or not, with other settings, or another conversation chosen; what is
        None stays. Raises KeyError when it is gone."""
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
            # XX: one that is deleted meanwhile does not come back
            await self._bus.link.call("ZADD", user_sessions_key(info.user_id), "XX", place, info.session_id)
        return changed

    async def name(self, session_id: str, query_id: str, title: str) -> bool:
        """Names a session after what was said in one of its turns; False where its user was quicker, or has taken back
        what was said."""
        keys = (session_key(session_id), turns_key(session_id, "A"))
        return bool(await self._bus.link.call(*_NAME(keys, f"{padded(query_id)} ", title)))

    async def of_user(self, user_id: str, limit: int, offset: int = 0) -> list[SessionInfo]:
        """A user's sessions: the pinned ones, the one pinned last first; then the others, the one used last first."""
        ids = await self._bus.link.call("ZREVRANGE", user_sessions_key(user_id), offset, offset + limit - 1)
        found: list[SessionInfo] = []
        for session_id in ids:
            # what cannot be a session's id is none
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
        """What the session's queries still write afterwards, of those accepted until now, is refused."""
        (stream,) = await self._bus.link.pipe_raw([("XINFO", "STREAM", QUERY_RECEIVED.stream)])
        if isinstance(stream, list):
            last = stream[stream.index(b"last-generated-id") + 1]
            # by itself: a full Redis refuses it, and would remove the rest all the same
            await self._bus.link.call("SET", deleted_key(session_id), last, "EX", _DELETED_SECONDS)

    async def delete(self, info: SessionInfo) -> None:
        """Removes a session and its turns, once it is closed."""
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
        """Nothing comes of these queries any more: whoever is at work on one, or on its answer, finds it `deleted`."""
        await self._bus.link.pipe([("SET", cancel_key(one), _TAKEN_BACK, "EX", _DELETED_SECONDS) for one in query_ids])

    async def deleted(self, session_id: str, query_id: str) -> bool:
        """Whether a query was taken back, or the session deleted that it belongs to. Whoever writes something of a
        query asks afterwards, and removes it then."""
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
        """The newest turns that a model may be shown, oldest first: those of one conversation (`shown`).

        before: what was said before this query; everything, when its id does not tell the time. after: the conversation
        that ends there, of a query that has no turn yet. asked: what `newest` was answered.
        """
        found: list[Turn] = []
        place: str | None = None
        try:
            if before is not None:
                # its own turn, where there is one, tells what came before it
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
        """The turn of a query. Raises ValueError when its id has not the form of one."""
        ms, number = order(query_id)
        page = await self.page(session_id, respondent_id, 1, f"{ms}-{number + 1}")
        return next((turn for turn in page.turns if turn.query_id == query_id), None)

    def newest(self, session_id: str, respondent_id: str) -> list[Command]:
        """What `turns` asks first, to be sent together with others."""
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
        """The newest turns, or the newest before a query. Raises ValueError when that id has not the form of one."""
        key = turns_key(session_id, respondent_id)
        start = "+" if before is None else f"({padded(before)}"
        members, total = asked or await self._bus.link.pipe(_page(key, start, limit))
        readable, last = kept(members), b""
        # what cannot be read fills no page; members with scores of their own have no order to go on in
        while len(readable) <= limit < len(members) and (not last or members[-1] < last):
            last = members[-1]
            (members, _) = await self._bus.link.pipe(_page(key, b"(" + last, limit))
            readable |= kept(members)
        newest = in_order(readable)[-limit - 1 :]
        return Page(newest[-limit:], len(newest) > limit, total)

    async def every_turn(self, session_id: str, respondent_id: str = "A") -> list[Turn]:
        """All that a session holds, oldest first."""
        return in_order(kept(await self._bus.link.call("ZRANGE", turns_key(session_id, respondent_id), 0, -1)))

    async def beginnings(self, user_id: str, limit: int) -> list[tuple[str, Turn]]:
        """The sessions that a user used last, the newest first, each with its first turn; without empty ones."""
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
        """Takes turns out of a session, of both respondents, and adds others of the first; in one step, and a repeat
        changes nothing."""
        words = [word for turn in added for word in (turn.query_id, turn.dump())]
        keys = [turns_key(session_id, r) for r in RESPONDENTS]
        await self._bus.link.call(
            *_BRING(
                (session_key(session_id), summary_key(session_id), steps_key(session_id), *keys),
                *(len(gone), *gone, *words),
            )
        )

    def appending(self, session_id: str, respondent_id: str, turn: Turn) -> list[Command]:
        """Stores a turn under its query's id: a repeat changes nothing."""
        keys = (session_key(session_id), turns_key(session_id, respondent_id), deleted_key(session_id))
        return [_APPEND(keys, turn.query_id, turn.dump(), now_ms(), int(respondent_id == "A"))]


def _listing(session_id: str, user_id: str, now: int) -> Command:
    # GT: a pinned one keeps its place
    return ("ZADD", user_sessions_key(user_id), "GT", now, session_id)


def _page(key: str, start: str | bytes, limit: int) -> list[Command]:
    """The members of a sorted set back from one, and how many it has. One more tells whether there are earlier ones."""
    return [("ZRANGE", key, start, "-", "BYLEX", "REV", "LIMIT", 0, limit + 1), ("ZCARD", key)]


def kept(members: Sequence[bytes]) -> dict[str, Turn]:
    """The turns of a sorted set, by their queries' ids. What is none is left out."""
    found: dict[str, Turn] = {}
    for member in members:
        try:
            place, value = member.split(b" ", 1)
            ms, _, seq = place.partition(b"-")
            turn = Turn.parse({"query_id": f"{int(ms)}-{int(seq)}", **orjson.loads(value)})
            found[turn.query_id] = turn
        except (ValueError, TypeError) as exc:
            # what is wrong with a turn, not the words in it
            where = member.partition(b" ")[0][:40].decode(errors="replace")
            not_understood("the turns of a session", where, type(exc).__name__, member)
    return found


def in_order(found: Mapping[str, Turn]) -> list[Turn]:
    """Turns by their queries' ids, the oldest first."""
    return [found[query_id] for query_id in sorted(found, key=order)]
