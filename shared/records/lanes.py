"""Accepting a query, and the lanes in which a session's queries are answered one at a time.

Everything that accepting changes lies in the hash slot of `query.received`, so that one script does all of it: a query
is accepted with its record, its session's list and its places, or not at all. A lane is a sorted set of the ids of
unfinished queries, per session and respondent. A query that is accepted into an empty lane has the turn at once, and
its entry says so (`turn`). An entry that is in no lane (whoever wrote it) takes its place when it is read; a place
whose entry the respondent has finished, or that is gone, is cleared by whoever finds it in the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.bus import Bus, Command, Script, order
from shared.bus.keys import lane_key, once_key, queries_key, record_key, waiting_key
from shared.bus.port import Reply, checked
from shared.contracts import QUERY_RECEIVED, Outgoing, RespondentId
from shared.telemetry.unread import not_understood

RESPONDENTS: tuple[RespondentId, ...] = ("A", "B")
# Who reads the queries for each respondent.
GROUPS: dict[str, str] = {"A": "generator", "B": "respondent-b"}

_STREAM = QUERY_RECEIVED.stream
# What their keys begin with.
_RECORDS = record_key("")

# Whether an id is before another one; no, where one of them is none.
BEFORE = """
local function before(a, b)
  local am, as = string.match(a, '^(%d+)-(%d+)$')
  local bm, bs = string.match(b, '^(%d+)-(%d+)$')
  if not am or not bm then return false end
  am, as, bm, bs = tonumber(am), tonumber(as), tonumber(bm), tonumber(bs)
  return am < bm or (am == bm and as < bs)
end
"""

# Whether a group has done with an entry: it was read and acknowledged, or is not there any more.
_FINISHED = (
    BEFORE
    + """
local function finished(stream, group, member)
  local ms, seq = string.match(member, '^(%d+)-(%d+)$')
  if not ms then return true end
  local id = string.format('%.0f-%.0f', ms, seq)
  if #redis.call('XRANGE', stream, id, id) == 0 then return true end
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, row in ipairs(groups) do
    local g = {}
    for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
    if g['name'] == group then
      if before(g['last-delivered-id'], id) then return false end
      return #redis.call('XPENDING', stream, group, id, id, 1) == 0
    end
  end
  return false
end
"""
)

# KEYS: stream, once, records; of a session also: its queries, its lanes, that of A first.
# ARGV: most unfinished queries, seconds, group of A, ms for the answer, number of words of the record, those words, the
# entry's words. Record and entry get the deadline by this clock: who accepts may not have heard that it was set.
# Returns the id, how many queries the group has not finished (-1: Redis has lost count), and the record's times; or the
# id of the earlier query with that once-key and its record; or nothing: there are too many of the session.
# An empty lane gives its turn with the place, and the entry says so: whoever reads it need not ask.
_ACCEPT = Script(
    _FINISHED
    + """
local function unfinished(stream, group)
  for _, row in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local g = {}
    for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
    if g['name'] == group then return g['lag'] and g['pending'] + g['lag'] or -1 end
  end
  return redis.call('XLEN', stream)
end
local earlier = redis.call('GET', KEYS[2])
if earlier then return {earlier, redis.call('HGETALL', KEYS[3] .. earlier)} end
-- a key of another type is noticed before anything is written
local size = {}
for i = 4, #KEYS do size[i] = redis.call('ZCARD', KEYS[i]) end
local most = tonumber(ARGV[1])
if KEYS[5] and size[5] >= most then
  -- what was never left is older than what is not finished
  for _, member in ipairs(redis.call('ZRANGE', KEYS[5], 0, 9)) do
    if finished(KEYS[1], ARGV[3], member) then redis.call('ZREM', KEYS[5], member) end
  end
  size[5] = redis.call('ZCARD', KEYS[5])
  if size[5] >= most then return {} end
end
local words, time = tonumber(ARGV[5]), redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local accepted, deadline = string.format('%.0f', now), string.format('%.0f', now + ARGV[4])
local entry, turn = {'deadline', deadline, unpack(ARGV, 6 + words)}, {}
for i = 5, #KEYS do
  if size[i] == 0 then turn[i] = i == 5 and 'A' or 'B' end
end
if turn[5] or turn[6] then
  table.insert(entry, 'turn')
  table.insert(entry, (turn[5] or '') .. (turn[6] or ''))
end
local id = redis.call('XADD', KEYS[1], '*', unpack(entry))
redis.call('SET', KEYS[2], id, 'EX', ARGV[2])
redis.call('HSET', KEYS[3] .. id, 'accepted', accepted, 'deadline', deadline, unpack(ARGV, 6, 5 + words))
redis.call('EXPIRE', KEYS[3] .. id, ARGV[2])
if KEYS[4] then
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  -- an answer may come late, and is kept from then on
  local kept = 2 * tonumber(ARGV[2])
  if size[4] > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', ms) end
  redis.call('ZADD', KEYS[4], string.format('%.0f', ms + kept * 1000), id)
  if size[4] == 0 or redis.call('TTL', KEYS[4]) < kept then redis.call('EXPIRE', KEYS[4], kept) end
  local member = string.format('%015.0f-%010.0f', ms, seq)
  for i = 5, #KEYS do
    redis.call('ZADD', KEYS[i], turn[i] and -1 or 0, member)
    redis.call('EXPIRE', KEYS[i], 86400)
  end
end
return {id, unfinished(KEYS[1], ARGV[3]), accepted, deadline}
"""
)

# Asks for the turn. KEYS: lane, waiting, stream. ARGV: member, inbox, group.
# Returns the empty string when it is granted, else who is before.
_TURN = Script(
    _FINISHED
    + """
redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
local mine = redis.call('ZSCORE', KEYS[1], ARGV[1]) == '-1'
while not mine do
  local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  mine = first == ARGV[1]
  if not mine then
    if not finished(KEYS[3], ARGV[3], first) then
      redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
      redis.call('EXPIRE', KEYS[2], 86400)
      return first
    end
    redis.call('ZREM', KEYS[1], first)
    redis.call('HDEL', KEYS[2], first)
  end
end
-- whoever runs stays first, also when an earlier query is read later
redis.call('ZADD', KEYS[1], -1, ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return ''
"""
)

# Of some queries, those that a group has not finished. KEYS: stream. ARGV: group, ids.
_OPEN = Script(
    _FINISHED
    + """
local found = {}
for i = 2, #ARGV do
  if not finished(KEYS[1], ARGV[1], ARGV[i]) then found[#found + 1] = ARGV[i] end
end
return found
"""
)

# Leaves the lane. KEYS: lane, waiting. ARGV: member. Returns the inbox of whoever is next, or the empty string.
_LEAVE = Script("""
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
return first and redis.call('HGET', KEYS[2], first) or ''
""")


def lane_keys(session_id: str) -> list[str]:
    """Everything of a session that lies beside the queries."""
    lanes = [key(session_id, respondent) for respondent in RESPONDENTS for key in (lane_key, waiting_key)]
    return [queries_key(session_id), *lanes]


def padded(query_id: str) -> str:
    """So that the lexical order is the order of ids."""
    ms, seq = order(query_id)
    return f"{ms:015d}-{seq:010d}"


def plain(member: bytes) -> str:
    ms, _, seq = member.decode().partition("-")
    return f"{int(ms)}-{int(seq)}"


@dataclass(frozen=True, slots=True)
class Accepted:
    """`earlier`: the record of the query that came with the same once-key before; nothing new was accepted. It is empty
    when the record is not there. unfinished: how many queries of all sessions the generators have not finished, this
    one included; None where Redis has lost count. accepted, deadline: in ms, by Redis' clock."""

    query_id: str
    earlier: dict[str, str] | None = None
    unfinished: int | None = None
    accepted: int = 0
    deadline: int = 0


async def accept(
    bus: Bus,
    message: Outgoing,
    record: Mapping[str, str],
    *,
    left: float,
    seconds: int,
    session_id: str | None = None,
    respondents: Sequence[str] = (),
    limit: int = 1,
    also: Sequence[Command] = (),
) -> Accepted | None:
    """Publishes a query once, with everything that belongs to it; None when the session has `limit` unfinished ones.

    message: a query.received with its once-key. left: seconds for its answer. record, seconds: what is kept of the
    query for its clients, with its times.
    session_id, respondents: whose lanes the query takes a place in; the limit counts the answers that are shown.
    also: commands sent in the same write; they are carried out even when the query is not accepted.
    """
    assert message.once is not None
    keys = [_STREAM, once_key(_STREAM, message.once), _RECORDS]
    if session_id is not None:
        keys += [queries_key(session_id), *(lane_key(respondent, session_id) for respondent in respondents)]
    words = [part for pair in record.items() for part in pair]
    entry = message.envelope.fields(bus.source)
    argv = (limit, seconds, GROUPS["A"], int(left * 1000), len(words), *words, *entry)
    found, *_ = map(checked, await bus.link.submit([_ACCEPT(keys, *argv), *also], True, now=True))
    match found:
        case [query_id, int(count), accepted, deadline]:
            unfinished = count if count >= 0 else None
            return Accepted(query_id.decode(), None, unfinished, int(accepted), int(deadline))
        case [query_id, earlier]:
            return Accepted(query_id.decode(), pairs(earlier))
    return None


def pairs(raw: Sequence[bytes]) -> dict[str, str]:
    """A hash as Redis returns it; whoever wrote into it."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in zip(raw[::2], raw[1::2], strict=True)
    }


def number(values: Mapping[str, str], name: str) -> int:
    """A field of such a hash; 0 when there is no number."""
    value = values.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


async def turn(bus: Bus, session_id: str, respondent_id: str, query_id: str, inbox: str) -> str | None:
    """None when it is this query's turn; else the query before it. `inbox` is told when that has left."""
    keys = (lane_key(respondent_id, session_id), waiting_key(respondent_id, session_id), _STREAM)
    first = await bus.link.call(*_TURN(keys, padded(query_id), inbox, GROUPS[respondent_id]))
    return plain(first) if first else None


async def leave(bus: Bus, session_id: str, respondent_id: str, query_id: str, *also: Command) -> list[Reply]:
    """Leaves the lane and wakes whoever waits next. also: asked in the same write; what they are answered."""
    keys = (lane_key(respondent_id, session_id), waiting_key(respondent_id, session_id))
    inbox, *replies = await bus.link.pipe([_LEAVE(keys, padded(query_id)), *also])
    if inbox:
        wake: tuple[Any, ...] = ("type", "wake", "session", session_id, "respondent", respondent_id)
        await bus.link.call("XADD", inbox, "NOMKSTREAM", "*", *wake)
    return replies


async def unfinished(bus: Bus, session_id: str, respondent_id: str) -> list[str]:
    """The ids of the queries in a lane, in their order."""
    return await unfinished_of(bus, [session_id], respondent_id)


async def unfinished_of(bus: Bus, session_ids: Sequence[str], respondent_id: str) -> list[str]:
    """The same of several sessions."""
    keys = [lane_key(respondent_id, session_id) for session_id in session_ids]
    lanes = await bus.link.pipe([("ZRANGE", key, 0, -1) for key in keys])
    found: set[str] = set()
    for key, members in zip(keys, lanes, strict=True):
        for member in members:
            try:
                found.add(plain(member))
            except ValueError as exc:
                not_understood(key, member.decode(errors="replace"), str(exc))
    return sorted(found, key=order)


async def awaited(bus: Bus, query_ids: Sequence[str]) -> set[str]:
    """Of some queries, in lanes or not, those whose answer somebody may be waiting for: what the shadow still does for
    one nobody sees."""
    return {raw.decode() for raw in await bus.link.call(*_OPEN((_STREAM,), GROUPS["A"], *query_ids))}


async def running(bus: Bus, session_id: str) -> bool:
    """Whether a respondent is at work on one of the session's queries."""
    counts = await bus.link.pipe([("ZCOUNT", lane_key(r, session_id), "-inf", -1) for r in RESPONDENTS])
    return any(counts)
