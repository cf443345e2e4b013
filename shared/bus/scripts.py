"""The few operations that must be atomic. Each touches keys of one hash slot only.

A tool worker needs no others: its user of Redis may not load any, and every participant that may load them knows
these. They take an amount of work that their caller cannot choose, because a script keeps everybody
else waiting.
"""

from shared.bus.port import Script

# The consumer that owns entries which any replica may claim at once.
UNOWNED_CONSUMER = "handover"

# Publishes at most once under a key. KEYS: stream, key. ARGV: seconds, what follows the stream in an XADD.
PUBLISH_ONCE = Script("""
local seen = redis.call('GET', KEYS[2])
if seen then return seen end
local id = redis.call('XADD', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], id, 'EX', ARGV[1])
return id
""")

# A heartbeat on one stream. Renews the claims on entries (a plain XCLAIM would steal them back from a new owner), and
# looks for what nobody keeps. A claim is as old as the server's clock says: when that goes back, as by a fail-over to
# another host, those of the dead lie ahead of it, and would look fresh until it has come there again. Whatever others
# seem to have renewed in this millisecond is therefore theirs from now on, of the first hundred entries.
# KEYS: stream. ARGV: group, consumer, heir, idle ms, id, …
# A Redis that takes no writes refuses it to everybody, also to who has nothing to renew: that the others are silent
# proves nothing then. Returns the server's time in ms, how many entries the heir has, how many are idle (each 0 or 1),
# and the ids that are lost.
RENEW_CLAIMS = Script("""
redis.call('XACK', KEYS[1], ARGV[1], '0-0')
local mine, kept, lost = {}, {}, {}
for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1000 + #ARGV, ARGV[2])) do
  mine[row[1]] = true
end
for i = 5, #ARGV do
  local list = mine[ARGV[i]] and kept or lost
  list[#list + 1] = ARGV[i]
end
for i = 1, #kept, 1000 do
  local claim = {'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0}
  for n = i, math.min(i + 999, #kept) do claim[#claim + 1] = kept[n] end
  claim[#claim + 1] = 'JUSTID'
  redis.call(unpack(claim))
end
for _, row in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 100)) do
  if row[3] == 0 and row[2] ~= ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], row[2], 0, row[1], 'JUSTID')
  end
end
local left = #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[3])
local idle = #redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[4], '-', '+', 1)
local t = redis.call('TIME')
return {t[1] * 1000 + math.floor(t[2] / 1000), left, idle, lost}
""")

# Sets how many deliveries an entry has had, where it is this consumer's. KEYS: stream.
# ARGV: group, consumer, id, how many.
SET_DELIVERY_COUNT = Script("""
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2]) > 0 then
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'RETRYCOUNT', ARGV[4], 'JUSTID')
end
""")

# Makes what a leaving consumer still holds claimable at once, five hundred entries a time, then removes the consumer.
# The interrupted delivery does not count as an attempt. KEYS: stream. ARGV: group, consumer, heir.
# Returns how many entries were moved; 0 when there were none, and the consumer is gone.
HAND_OVER = Script("""
local p = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 500, ARGV[2])
for _, row in ipairs(p) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, row[1],
             'IDLE', 1000000000, 'RETRYCOUNT', math.max(row[4] - 1, 0), 'JUSTID')
end
if #p == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return #p
""")

# Removes consumers that hold nothing and have been silent for a while, a hundred at most. KEYS: stream.
# ARGV: group, idle ms. Returns how many are not silent.
REAP = Script("""
local removed, heard = 0, 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #row, 2 do c[row[i]] = row[i + 1] end
  if c['idle'] <= tonumber(ARGV[2]) then
    heard = heard + 1
  elseif c['pending'] == 0 and removed < 100 then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c['name'])
    removed = removed + 1
  end
end
return heard
""")

# Removes excess consumers: those with a name longer than 200 bytes, and those beyond the first thousand of their group.
# A captured worker may read under any name, and each name costs memory. Any replica may claim their entries at once.
# KEYS: stream. ARGV: group, the unowned consumer. Returns 1 when there may be more excess consumers, else 0.
DROP_EXCESS = Script("""
local moved, removed = 0, 0
for n, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #row, 2 do c[row[i]] = row[i + 1] end
  if c['name'] ~= ARGV[2] and (#c['name'] > 200 or n > 1000) then
    if moved > 1000 or removed >= 100 then return 1 end
    local p = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 500, c['name'])
    for _, entry in ipairs(p) do
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry[1], 'IDLE', 1000000000, 'JUSTID')
    end
    moved = moved + #p
    if #p == c['pending'] then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c['name'])
      removed = removed + 1
    end
  end
end
return 0
""")

# Removes a stream without entries, with its groups. KEYS: stream. Returns 1 if it was removed, else 0.
DROP_EMPTY = Script("return redis.call('XLEN', KEYS[1]) == 0 and redis.call('UNLINK', KEYS[1]) or 0")

# The entries between two ids in which a text occurs, of the next so many (200 at most); of a longer text its first 200
# bytes, so that looking for it takes no longer. KEYS: stream. ARGV: first id, id behind the last, text, how many; FIRST
# for whoever looks for one near the beginning: what follows it is not read, and reading is all that it costs.
# Returns the id to go on from ('' at the end), and those that were found.
MENTIONING = Script("""
local found = {''}
local text = string.sub(ARGV[3], 1, 200)
local left = math.min(200, tonumber(ARGV[4]))
local first, after = ARGV[5] == 'FIRST', ARGV[1]
local count = first and 1 or left
while left > 0 do
  local page = redis.call('XRANGE', KEYS[1], after, '(' .. ARGV[2], 'COUNT', math.min(count, left))
  for _, entry in ipairs(page) do
    for i = 2, #entry[2], 2 do
      if string.find(entry[2][i], text, 1, true) then
        found[#found + 1] = entry[1]
        break
      end
    end
  end
  if #page < math.min(count, left) or (first and #found > 1) then return found end
  after = '(' .. page[#page][1]
  left, count = left - #page, 2 * count
end
found[1] = after
return found
""")

# How many entries come after an id, ten thousand at most: Redis loses count when an entry was deleted that a group has
# not read. KEYS: stream. ARGV: id.
UNREAD = Script("return #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', 10000)")
