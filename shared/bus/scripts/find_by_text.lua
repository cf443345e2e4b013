-- Find the entries between two ids that contain a text, among the next entries (at most 200).
-- Only the first 200 bytes of the text are compared, so that a long text takes no longer.
-- KEYS: stream. ARGV: first id, id after the last, text, number of entries.
-- Returns the id to continue from ('' at the end), then the ids found.
local found = {''}
local text = string.sub(ARGV[3], 1, 200)
local count = math.min(200, tonumber(ARGV[4]))
local page = redis.call('XRANGE', KEYS[1], ARGV[1], '(' .. ARGV[2], 'COUNT', count)
for _, entry in ipairs(page) do
  for i = 2, #entry[2], 2 do
    if string.find(entry[2][i], text, 1, true) then
      found[#found + 1] = entry[1]
      break
    end
  end
end
if #page == count then found[1] = '(' .. page[#page][1] end
return found
