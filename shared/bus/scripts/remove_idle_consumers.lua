-- Remove consumers that own no entries and have been idle for a while, at most 100.
-- KEYS: stream. ARGV: group, idle ms. Returns the number of consumers that are not idle.
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
