-- Remove the entries of a page that have one of some values in a field, if every group has finished them. A group's
-- last delivered entry stays: without it Redis cannot count the group's unread entries.
-- KEYS: stream. ARGV: first id, number of entries, field, value, … Returns the last id that was read; nothing at the
-- end.
local bounds, wanted = {}, {}
for _, row in ipairs(redis.call('EXISTS', KEYS[1]) == 1 and redis.call('XINFO', 'GROUPS', KEYS[1]) or {}) do
  local g = {}
  for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
  bounds[#bounds + 1] = g['last-delivered-id']
  if g['pending'] > 0 then
    local oldest = redis.call('XPENDING', KEYS[1], g['name'])[2]
    if oldest then bounds[#bounds + 1] = oldest end
  end
end
for i = 4, #ARGV do wanted[ARGV[i]] = true end
return each_entry(KEYS[1], ARGV[1], tonumber(ARGV[2]), function(id, f)
  local mine = wanted[f[ARGV[3]]]
  for _, bound in ipairs(bounds) do mine = mine and before(id, bound) end
  if mine then redis.call('XDEL', KEYS[1], id) end
end)
