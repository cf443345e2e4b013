"""The few operations that must be atomic. Each touches keys of one hash slot only."""

from shared.bus.link import Script

# Publishes at most once under a key. KEYS: stream, key.
# ARGV: seconds, length that an event stream keeps (0 for a work stream), field, value, …
PUBLISH_ONCE = Script("""
local seen = redis.call('GET', KEYS[2])
if seen then return seen end
local id
if ARGV[2] == '0' then
  id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 3))
else
  id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', unpack(ARGV, 3))
end
redis.call('SET', KEYS[2], id, 'EX', ARGV[1])
return id
""")

# Renews the claim on entries and tells which ones are lost. A plain XCLAIM would steal them back from a new owner.
# KEYS: stream. ARGV: group, consumer, id, …
RENEW = Script("""
local lost = {}
for i = 3, #ARGV do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if p[1] and p[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
""")

# Makes what a leaving consumer still holds claimable at once, then removes the consumer. The interrupted delivery does
# not count as an attempt. KEYS: stream. ARGV: group, consumer, heir.
HAND_OVER = Script("""
while true do
  local p = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 500, ARGV[2])
  if #p == 0 then break end
  for _, row in ipairs(p) do
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, row[1],
               'IDLE', 1000000000, 'RETRYCOUNT', math.max(row[4] - 1, 0), 'JUSTID')
    local moved = redis.call('XPENDING', KEYS[1], ARGV[1], row[1], row[1], 1)
    if moved[1] and moved[1][2] == ARGV[2] then redis.call('XACK', KEYS[1], ARGV[1], row[1]) end
  end
end
return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
""")

# Removes finished entries of a stream that one group reads. When the entry that was delivered last is deleted while an
# earlier one is still there, Redis cannot tell the group's lag any more (null): whoever scales by it would see no work.
# Trimming from the front has no such effect: that comes first, and the entry delivered last stays until it is trimmed.
# Nothing newer than the entries named is removed: observers may not have seen it yet. KEYS: stream. ARGV: group, id, …
REMOVE_FINISHED = Script("""
local function parts(id)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  return tonumber(ms), tonumber(seq)
end
local function earlier(a, b)
  local am, as = parts(a)
  local bm, bs = parts(b)
  return am < bm or (am == bm and as < bs)
end
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups['err'] then return 0 end
local last
for _, row in ipairs(groups) do
  local g = {}
  for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
  if g['name'] == ARGV[1] then last = g['last-delivered-id'] end
end
local removed = 0
if last then
  local newest = ARGV[2]
  for i = 3, #ARGV do
    if earlier(newest, ARGV[i]) then newest = ARGV[i] end
  end
  -- a group that was made anew has not read them yet
  if earlier(last, newest) then newest = last end
  local ms, seq = parts(newest)
  local bound = string.format('%.0f-%.0f', ms, seq + 1)
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1])
  if pending[1] > 0 and earlier(pending[2], bound) then bound = pending[2] end
  removed = redis.call('XTRIM', KEYS[1], 'MINID', '=', bound)
end
for i = 2, #ARGV do
  if ARGV[i] ~= last then removed = removed + redis.call('XDEL', KEYS[1], ARGV[i]) end
end
return removed
""")

# Removes consumers that hold nothing and have been silent for a while. KEYS: stream. ARGV: group, idle ms.
REAP = Script("""
local removed = 0
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #row, 2 do c[row[i]] = row[i + 1] end
  if c['pending'] == 0 and c['idle'] > tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c['name'])
    removed = removed + 1
  end
end
return removed
""")
