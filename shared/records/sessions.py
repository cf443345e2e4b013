"""Sessions: who owns one, its turns, and the lane in which its queries are answered one at a time.

A session's keys share the hash tag `{session_id}`. A lane is a sorted set of accepted query ids, per respondent. The
gateway puts a ticket into it before it publishes the query, so that whoever reads a later query first knows that an
earlier one is on its way.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shared.bus import Bus, Command, Script, order
from shared.contracts import PREFIX
from shared.envelope import now_ms

MAX_TURNS = 50
# Long enough for a publish that follows its ticket at once, also with a reconnect in between.
TICKET_MS = 3_000
LANE_SECONDS = 86_400

# KEYS: lane. ARGV: ticket, limit. Returns 0 when the session has too many unfinished queries.
_RESERVE = Script("""
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], 0, 't:' .. now[1] .. string.format('%03d', math.floor(now[2] / 1000)) .. ':' .. ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
return 1
""")

# Redeems the ticket for the query's place. A ticket that is gone was redeemed by the query's own turn, which may be
# over by now: a place taken then would block the lane. KEYS: lane. ARGV: ticket, query id as a member.
_CONFIRM = Script("""
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[t:', '(u')) do
  if string.sub(member, -#ARGV[1]) == ARGV[1] then
    redis.call('ZREM', KEYS[1], member)
    if ARGV[2] ~= '' then redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[2]) end
  end
end
return 1
""")

# Asks for the turn. KEYS: lane, waiting. ARGV: member, ticket, inbox, ticket ms.
# Returns the empty string when it is granted, else who is first ('' is never a member).
_TURN = Script("""
local now = redis.call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local accepted = tonumber(string.match(ARGV[1], '^q:(%d+)-'))
local blocked = nil
for _, member in ipairs(redis.call('ZRANGEBYLEX', KEYS[1], '[t:', '(u')) do
  local at = tonumber(string.match(member, '^t:(%d+):'))
  if ARGV[2] ~= '' and string.sub(member, -#ARGV[2]) == ARGV[2] then
    redis.call('ZREM', KEYS[1], member)
  elseif at == nil or ms - at > tonumber(ARGV[4]) then
    redis.call('ZREM', KEYS[1], member)
  elseif at <= accepted then
    -- a ticket drawn later belongs to a later query
    blocked = member
  end
end
redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
local running = redis.call('ZSCORE', KEYS[1], ARGV[1]) == '-1'
if not running then
  if first == ARGV[1] and blocked then first = blocked end
  if first ~= ARGV[1] then
    redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
    redis.call('EXPIRE', KEYS[2], 86400)
    return first
  end
end
redis.call('ZADD', KEYS[1], -1, ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return ''
""")

# Leaves the lane. KEYS: lane, waiting. ARGV: member. Returns the inbox of whoever is next, or the empty string.
_RELEASE = Script("""
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
return first and redis.call('HGET', KEYS[2], first) or ''
""")

# Keeps a turn, unless its session was deleted meanwhile.
# KEYS: session, turns. ARGV: query id, turn, now ms, most turns.
_APPEND = Script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'updated', ARGV[3])
local over = redis.call('HLEN', KEYS[2]) - tonumber(ARGV[4])
if over > 0 then
  local ids = redis.call('HKEYS', KEYS[2])
  table.sort(ids, function(a, b)
    local am, as = string.match(a, '^(%d+)-(%d+)$')
    local bm, bs = string.match(b, '^(%d+)-(%d+)$')
    if am ~= bm then return tonumber(am) < tonumber(bm) end
    return tonumber(as) < tonumber(bs)
  end)
  for i = 1, over do redis.call('HDEL', KEYS[2], ids[i]) end
end
return 1
""")


@dataclass(frozen=True, slots=True)
class Turn:
    """A query with its finished answer: clean text, no thinking. `time` is in ms since the epoch.

    `interrupted`: the user stopped the answer, and this is the part that had been written.
    `ratio`: characters per token as the model backend counted this conversation, where it did.
    """

    query_id: str
    query: str
    answer: str
    time: int
    interrupted: bool = False
    ratio: float | None = None

    def messages(self) -> list[dict[str, str]]:
        """The turn as the model sees it."""
        return [{"role": "user", "content": self.query}, {"role": "assistant", "content": self.answer}]

    def dump(self) -> bytes:
        return orjson.dumps(
            {
                "query": self.query,
                "answer": self.answer,
                "time": self.time,
                "interrupted": self.interrupted,
                "ratio": self.ratio,
            }
        )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """`title` is the beginning of the first query; times are in ms since the epoch."""

    session_id: str
    user_id: str
    title: str
    created: int
    updated: int


def turns_before(turns: Sequence[Turn], query_id: str) -> list[Turn]:
    """The turns of queries that were accepted before this one; all but its own, when its id does not tell the time."""
    try:
        at = order(query_id)
    except ValueError:
        return [turn for turn in turns if turn.query_id != query_id]
    return [turn for turn in turns if order(turn.query_id) < at]


def session_key(session_id: str, *parts: str) -> str:
    return ":".join((f"{PREFIX}session:{{{session_id}}}", *parts))


def user_sessions_key(user_id: str) -> str:
    return f"{PREFIX}sessions:{user_id}"


def _member(query_id: str) -> str:
    """Padded, so that the lexical order is the order of ids."""
    ms, seq = order(query_id)
    return f"q:{ms:015d}-{seq:010d}"


def _query_id(member: str) -> str:
    ms, _, seq = member.removeprefix("q:").partition("-")
    return f"{int(ms)}-{int(seq)}"


class Sessions:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    # ── ownership ────────────────────────────────────────────────────────────────────────────────────────────

    async def open(self, session_id: str, user_id: str, title: str) -> str:
        """Makes the session if it is new; returns the user who owns it."""
        key, now = session_key(session_id), now_ms()
        replies = await self._bus.link.pipe(
            [
                ("HSETNX", key, "user_id", user_id),
                ("HSETNX", key, "created", now),
                ("HSETNX", key, "title", title[:80]),
                ("HSETNX", key, "updated", now),
                ("HGET", key, "user_id"),
                # one round trip for the usual case; what is not the user's is taken out again, and never listed
                ("ZADD", user_sessions_key(user_id), now, session_id),
            ]
        )
        owner: str = replies[-2].decode()
        if owner != user_id:
            await self._bus.link.call("ZREM", user_sessions_key(user_id), session_id)
        return owner

    async def info(self, session_id: str) -> SessionInfo | None:
        raw = await self._bus.link.call("HGETALL", session_key(session_id))
        if not raw:
            return None
        values = {name.decode(): value.decode() for name, value in zip(raw[::2], raw[1::2], strict=True)}
        return SessionInfo(
            session_id,
            values.get("user_id", ""),
            values.get("title", ""),
            int(values.get("created", 0)),
            int(values.get("updated", 0)),
        )

    async def of_user(self, user_id: str, limit: int, offset: int = 0) -> list[SessionInfo]:
        """A user's sessions, the one used last first."""
        ids = await self._bus.link.call("ZREVRANGE", user_sessions_key(user_id), offset, offset + limit - 1)
        found = [await self.info(session_id.decode()) for session_id in ids]
        return [info for info in found if info is not None and info.user_id == user_id]

    async def delete(self, info: SessionInfo, respondents: Sequence[str] = ("A", "B")) -> list[str]:
        """Removes a session and its turns; returns the ids of its queries that are not finished, to be cancelled."""
        lanes = [session_key(info.session_id, "lane", respondent) for respondent in respondents]
        open_queries: set[str] = set()
        for lane in lanes:
            members = await self._bus.link.call("ZRANGE", lane, 0, -1)
            open_queries.update(_query_id(m.decode()) for m in members if m.startswith(b"q:"))
        await self._bus.link.pipe(
            [
                ("DEL", session_key(info.session_id), *(session_key(info.session_id, "turns", r) for r in respondents)),
                ("ZREM", user_sessions_key(info.user_id), info.session_id),
            ]
        )
        return sorted(open_queries, key=order)

    # ── turns ────────────────────────────────────────────────────────────────────────────────────────────────

    async def turns(self, session_id: str, respondent_id: str) -> list[Turn]:
        """Oldest first."""
        raw = await self._bus.link.call("HGETALL", session_key(session_id, "turns", respondent_id))
        found = []
        for query_id, data in zip(raw[::2], raw[1::2], strict=True):
            value: dict[str, Any] = orjson.loads(data)
            found.append(Turn(query_id=query_id.decode(), **value))
        return sorted(found, key=lambda turn: order(turn.query_id))

    def appending(self, session_id: str, respondent_id: str, turn: Turn, most: int = MAX_TURNS) -> list[Command]:
        """Stores a turn under its query's id: a repeat changes nothing."""
        keys = (session_key(session_id), session_key(session_id, "turns", respondent_id))
        return [_APPEND(keys, turn.query_id, turn.dump(), now_ms(), most)]

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def reserve(self, session_id: str, respondents: Sequence[str], limit: int) -> str | None:
        """A ticket for a query about to be published; None when the session has `limit` unfinished queries."""
        ticket = uuid.uuid4().hex
        commands = [_RESERVE((session_key(session_id, "lane", r),), ticket, limit) for r in respondents]
        granted = await self._bus.link.pipe(commands)
        if all(granted):
            return ticket
        await self.confirm(session_id, respondents, ticket, None)
        return None

    async def confirm(self, session_id: str, respondents: Sequence[str], ticket: str, query_id: str | None) -> None:
        """Puts the accepted query in the ticket's place; with None the ticket is given back."""
        member = "" if query_id is None else _member(query_id)
        await self._bus.link.pipe(
            [_CONFIRM((session_key(session_id, "lane", r),), ticket, member) for r in respondents]
        )

    async def turn(
        self, session_id: str, respondent_id: str, query_id: str, ticket: str | None, inbox: str
    ) -> str | None:
        """None when it is this query's turn. Else what is before it: a query id, or '' for one not yet published."""
        keys = (session_key(session_id, "lane", respondent_id), session_key(session_id, "waiting", respondent_id))
        reply = await self._bus.link.call(*_TURN(keys, _member(query_id), ticket or "", inbox, TICKET_MS))
        first = reply.decode()
        if not first:
            return None
        return _query_id(first) if first.startswith("q:") else ""

    async def release(self, session_id: str, respondent_id: str, query_id: str) -> None:
        """Leaves the lane and wakes whoever waits next."""
        keys = (session_key(session_id, "lane", respondent_id), session_key(session_id, "waiting", respondent_id))
        inbox = await self._bus.link.call(*_RELEASE(keys, _member(query_id)))
        if inbox:
            await self._bus.link.call(
                *("XADD", inbox, "NOMKSTREAM", "*", "type", "wake", "session", session_id, "respondent", respondent_id)
            )
