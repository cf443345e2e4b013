-- Change an existing session. KEYS: session. ARGV: names and values. Returns the changed session; nothing if it is
-- missing.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
redis.call('HSET', KEYS[1], unpack(ARGV))
return redis.call('HGETALL', KEYS[1])
