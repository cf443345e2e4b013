-- Create a journal or take it over: write all entries, or none if Redis refuses the first. KEYS: journal.
-- ARGV: seconds to live, the claim's name, then id, type, time and data of each entry. Returns the id of the first.
for i = 3, #ARGV, 4 do
  local claim = i == 3 and {'claim', ARGV[2]} or {}
  redis.call('XADD', KEYS[1], ARGV[i], 'type', ARGV[i + 1], 'time', ARGV[i + 2], 'data', ARGV[i + 3], unpack(claim))
  publish_entry(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return ARGV[3]
