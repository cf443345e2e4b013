-- Changes a session that is there. KEYS: session. ARGV: names and values. Returns it as it is then; nothing without one.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
redis.call('HSET', KEYS[1], unpack(ARGV))
return redis.call('HGETALL', KEYS[1])
