-- Remove excess consumers: names longer than 200 bytes, and those after the first 1000 of their group.
-- A captured worker may read under any name, and each name costs memory. Any replica may claim their entries at once.
-- KEYS: stream. ARGV: group, unowned consumer. Returns 1 when there may be more excess consumers, else 0.
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
