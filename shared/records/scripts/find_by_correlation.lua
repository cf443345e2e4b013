-- Find the entries with a correlation id among the next entries between two ids (at most 250).
-- KEYS: stream. ARGV: first id, last id, correlation id, number of entries.
-- Returns the id to continue from ('' at the end), then the ids found.
local count = math.min(250, tonumber(ARGV[4]))
local page = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', count)
local found = {''}
if #page == count then found[1] = '(' .. page[#page][1] end
for _, entry in ipairs(page) do
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == 'correlation_id' then
      if fields[i + 1] == ARGV[3] then found[#found + 1] = entry[1] end
      break
    end
  end
end
return found
