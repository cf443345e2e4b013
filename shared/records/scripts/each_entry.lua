-- Define each_entry: call a function for each entry after an id, at most `count` entries and about 256 kB, because
-- Redis serves no other client meanwhile. The sizes of earlier entries decide how many are read at once.
local function each_entry(stream, after, count, each)
  local seen, room, number = '', 262144, 1
  while count > 0 and room > 0 do
    local found = redis.call('XRANGE', stream, after, '+', 'COUNT', math.min(number, count))
    if #found == 0 then break end
    local size = 1
    for _, entry in ipairs(found) do
      local f = {}
      for i = 1, #entry[2], 2 do
        f[entry[2][i]] = entry[2][i + 1]
        size = size + #entry[2][i + 1]
      end
      each(entry[1], f)
      seen = entry[1]
    end
    after, count, room = '(' .. seen, count - #found, room - size
    number = math.max(1, math.min(16, 2 * #found, math.floor(room * #found / size)))
  end
  return seen
end
