-- Replace an existing field of a hash. KEYS: hash. ARGV: field, value. Returns 1, or 0 for a missing field.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
