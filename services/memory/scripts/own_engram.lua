-- Store the owner of an engram before it is written. KEYS: state. ARGV: user, seconds.
-- Returns 1; 0 when the engram was deleted.
if redis.call('HEXISTS', KEYS[1], 'deleted') == 1 then return 0 end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
