-- Remove an engram's annotations, and store a marker of its deletion. KEYS: state. ARGV: seconds.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'deleted', '1')
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
