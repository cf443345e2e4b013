-- Publish an entry at most once under a key.
-- KEYS: stream, key. ARGV: seconds that the key stays, then the arguments of XADD after the stream.
-- Returns the id of the entry, also of the earlier one.
local seen = redis.call('GET', KEYS[2])
if seen then return seen end
local id = redis.call('XADD', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], id, 'EX', ARGV[1])
return id
