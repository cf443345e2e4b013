-- Find the replicas that wrote a journal and their tool calls. KEYS: journal. ARGV: lower bound of the ids, number of
-- entries. Returns the last id that was read, then type and data of each entry found; nothing at the end.
local found = {''}
found[1] = each_entry(KEYS[1], ARGV[1], tonumber(ARGV[2]), function(_, f)
  if f['type'] == 'claimed' or f['type'] == 'tool.request' then
    found[#found + 1] = f['type']
    found[#found + 1] = f['data'] or ''
  end
end)
return found[1] ~= '' and found or {}
