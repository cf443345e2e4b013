-- Define finished: return whether a group has read and acknowledged an entry, or the entry is missing.
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
