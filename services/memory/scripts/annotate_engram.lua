-- Store the annotation of a kind unless one with a larger stamp is there.
-- KEYS: state. ARGV: kind, stamp, note, seconds.
-- Returns the owner of the engram ('' if no replica has begun to write it), or nil when it was deleted.
if redis.call('HEXISTS', KEYS[1], 'deleted') == 1 then return nil end
local old = redis.call('HGET', KEYS[1], ARGV[1])
if not old or string.sub(old, 1, #ARGV[2]) < ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
return redis.call('HGET', KEYS[1], 'owner') or ''
