-- Which replicas wrote a journal, and which tools they called. KEYS: journal. ARGV: after which entry, how many entries.
-- Returns the last entry seen, then type and data in turn; nothing at the end.
local found = {''}
found[1] = each_entry(KEYS[1], ARGV[1], tonumber(ARGV[2]), function(_, f)
  if f['type'] == 'claimed' or f['type'] == 'tool.request' then
    found[#found + 1] = f['type']
    found[#found + 1] = f['data'] or ''
  end
end)
return found[1] ~= '' and found or {}
