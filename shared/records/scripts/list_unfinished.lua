-- Return the queries among some that a group has not finished. KEYS: stream. ARGV: group, ids.
local found = {}
for i = 2, #ARGV do
  if not finished(KEYS[1], ARGV[1], ARGV[i]) then found[#found + 1] = ARGV[i] end
end
return found
