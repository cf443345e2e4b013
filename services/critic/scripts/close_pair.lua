-- Mark a pair as settled. KEYS: pair, waiting. ARGV: query id, seconds.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'closed', 1)
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('ZREM', KEYS[2], ARGV[1])
