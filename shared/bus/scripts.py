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
