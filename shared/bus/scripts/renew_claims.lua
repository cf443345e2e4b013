-- Renew a consumer's claims on entries of one stream, and report entries that are claimable.
-- KEYS: stream. ARGV: group, consumer, unowned consumer, idle ms, then entry ids.
-- Returns the server's time in ms, whether the unowned consumer has entries (0 or 1), whether any entry is idle (0 or
-- 1), and the ids that the consumer lost.
-- A plain XCLAIM would take entries back from a new owner, so the owner is checked first.
-- When the server's clock goes back (fail-over to another host), the claims of dead consumers lie in its future and
-- would look fresh. So claims of others with idle time 0 are renewed in their owners' names, of the first 100 entries.
-- A Redis that refuses writes refuses the first command to everyone: silence of others proves nothing then.
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
