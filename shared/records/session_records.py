"""Whole sessions by their meaning, to be moved to another Redis: read in one step, written so that a repeat changes
nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from shared.bus import Bus, Command, Script
from shared.contracts import PREFIX, RespondentId
from shared.records.sessions import MAX_TURNS, session_key, user_sessions_key

RESPONDENTS: tuple[RespondentId, ...] = ("A", "B")
SESSION_ID = r"^[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,127}$"
QUERY_ID = r"^[0-9]{1,15}-[0-9]{1,10}$"
_SESSION_KEY = re.compile(re.escape(PREFIX) + r"session:\{([^{}]+)\}")
_SCAN = 500

# A session and its turns at one moment. KEYS: session, turns of each respondent.
_READ = Script("""
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HGETALL', key) end
return found
""")

# Adds what is not there. KEYS: session, turns of each respondent.
# ARGV: user, title, created, updated, most turns, then per respondent a number of turns and so many ids and turns.
# Returns -1 when the session is another user's, else the number of turns that were added.
_WRITE = Script("""
local owner = redis.call('HGET', KEYS[1], 'user_id')
if owner and owner ~= ARGV[1] then return -1 end
redis.call('HSETNX', KEYS[1], 'user_id', ARGV[1])
redis.call('HSETNX', KEYS[1], 'title', ARGV[2])
redis.call('HSETNX', KEYS[1], 'created', ARGV[3])
if tonumber(redis.call('HGET', KEYS[1], 'updated') or '0') < tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], 'updated', ARGV[4])
end
local added, at = 0, 6
for k = 2, #KEYS do
  local number = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, number do
    added = added + redis.call('HSETNX', KEYS[k], ARGV[at], ARGV[at + 1])
    at = at + 2
  end
  local over = redis.call('HLEN', KEYS[k]) - tonumber(ARGV[5])
  if over > 0 then
    local ids = redis.call('HKEYS', KEYS[k])
    table.sort(ids, function(a, b)
      local am, as = string.match(a, '^(%d+)-(%d+)$')
      local bm, bs = string.match(b, '^(%d+)-(%d+)$')
      if am ~= bm then return tonumber(am) < tonumber(bm) end
      return tonumber(as) < tonumber(bs)
    end)
    for i = 1, over do redis.call('HDEL', KEYS[k], ids[i]) end
  end
end
return added
""")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TurnRecord(_Model):
    """A turn as `shared.records.sessions.Turn` has it."""

    query_id: str = Field(pattern=QUERY_ID)
    query: str
    answer: str
    time: int = Field(ge=0)
    interrupted: bool = False
    ratio: float | None = Field(default=None, allow_inf_nan=False)


class SessionRecord(_Model):
    """`used`: its place in the user's list; times are in ms since the epoch."""

    session_id: str = Field(pattern=SESSION_ID)
    user_id: str = Field(min_length=1, max_length=200)
    title: str
    created: int = Field(ge=0)
    updated: int = Field(ge=0)
    used: int = Field(ge=0)
    turns: dict[RespondentId, list[TurnRecord]]


def _keys(session_id: str) -> list[str]:
    return [session_key(session_id), *(session_key(session_id, "turns", r) for r in RESPONDENTS)]


async def session_ids(bus: Bus) -> AsyncIterator[list[str]]:
    """Pages of the ids of all sessions; one that is there the whole time comes at least once, perhaps twice."""
    async for keys in scan(bus, f"{PREFIX}session:{{*}}"):
        found = [_SESSION_KEY.fullmatch(key) for key in keys]
        yield [match[1] for match in found if match is not None]


async def scan(bus: Bus, pattern: str) -> AsyncIterator[list[str]]:
    """Pages of the keys that match, some of them empty; the server is never busy with it for long."""
    cursor = "0"
    while True:
        raw_cursor, keys = await bus.link.call("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN)
        yield [key.decode() for key in keys]
        cursor = raw_cursor.decode()
        if cursor == "0":
            return


async def read_sessions(bus: Bus, ids: Sequence[str]) -> list[dict[str, Any]]:
    """The sessions as records; one that was deleted meanwhile is left out."""
    if not ids:
        return []
    raw = await bus.link.pipe([_READ(_keys(session_id)) for session_id in ids])
    found = []
    for session_id, (info, *turns) in zip(ids, raw, strict=True):
        if not info:
            continue
        values = {name.decode(): value.decode() for name, value in zip(info[::2], info[1::2], strict=True)}
        record: dict[str, Any] = {
            "session_id": session_id,
            "user_id": values.get("user_id", ""),
            "title": values.get("title", ""),
            "created": int(values.get("created", 0)),
            "updated": int(values.get("updated", 0)),
            "turns": {r: _turns(data) for r, data in zip(RESPONDENTS, turns, strict=True) if data},
        }
        found.append(record)
    places = await bus.link.pipe([("ZSCORE", user_sessions_key(r["user_id"]), r["session_id"]) for r in found])
    for record, place in zip(found, places, strict=True):
        record["used"] = int(float(place)) if place is not None else record["updated"]
    return found


def _turns(raw: Sequence[bytes]) -> list[dict[str, Any]]:
    found = [{"query_id": i.decode(), **orjson.loads(data)} for i, data in zip(raw[::2], raw[1::2], strict=True)]
    return sorted(found, key=lambda turn: tuple(int(part) for part in turn["query_id"].split("-")))


async def write_sessions(bus: Bus, records: Sequence[SessionRecord]) -> list[int]:
    """Adds what is not there yet; per session the number of turns added, or -1 for one that is another user's."""
    added: list[int] = await bus.link.pipe([_writing(record) for record in records])
    # behind the session itself: an entry of the list without a session would be shown to nobody
    listed = [
        ("ZADD", user_sessions_key(record.user_id), "GT", record.used, record.session_id)
        for record, number in zip(records, added, strict=True)
        if number >= 0
    ]
    if listed:
        await bus.link.pipe(listed)
    return added


def _writing(record: SessionRecord) -> Command:
    parts: list[Any] = [record.user_id, record.title, record.created, record.updated, MAX_TURNS]
    for respondent in RESPONDENTS:
        turns = record.turns.get(respondent, [])
        parts.append(len(turns))
        for turn in turns:
            parts += [turn.query_id, orjson.dumps(turn.model_dump(exclude={"query_id"}))]
    return _WRITE(_keys(record.session_id), *parts)
