-- Makes a journal, or takes it over: all entries, or none where the first is refused. KEYS: journal.
-- ARGV: seconds to live, the claim's name, then of each entry id, type, time, data.
for i = 3, #ARGV, 4 do
  local claim = i == 3 and {'claim', ARGV[2]} or {}
  redis.call('XADD', KEYS[1], ARGV[i], 'type', ARGV[i + 1], 'time', ARGV[i + 2], 'data', ARGV[i + 3], unpack(claim))
  publish_entry(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return ARGV[3]
