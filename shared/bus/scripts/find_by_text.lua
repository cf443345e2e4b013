-- Find the entries between two ids that contain a text, among the next entries (at most 200).
-- Only the first 200 bytes of the text are compared, so that a long text takes no longer.
-- KEYS: stream. ARGV: first id, id after the last, text, number of entries, and FIRST to find one near the beginning:
-- the entries after it are not read. Returns the id to continue from ('' at the end), then the ids found.
local found = {''}
local text = string.sub(ARGV[3], 1, 200)
local left = math.min(200, tonumber(ARGV[4]))
local first, after = ARGV[5] == 'FIRST', ARGV[1]
local count = first and 1 or left
while left > 0 do
  local page = redis.call('XRANGE', KEYS[1], after, '(' .. ARGV[2], 'COUNT', math.min(count, left))
  for _, entry in ipairs(page) do
    for i = 2, #entry[2], 2 do
      if string.find(entry[2][i], text, 1, true) then
        found[#found + 1] = entry[1]
        break
      end
    end
  end
  if #page < math.min(count, left) or (first and #found > 1) then return found end
  after = '(' .. page[#page][1]
  left, count = left - #page, 2 * count
end
found[1] = after
return found
