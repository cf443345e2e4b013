-- Create a session if it is new. KEYS: session, deleted. ARGV: user, title, now ms, the query for which it is opened
-- or ''. Returns the session; nothing if the query's session was deleted and no new one exists.
local found = redis.call('HGETALL', KEYS[1])
if #found > 0 or deleted(redis.call('GET', KEYS[2]), ARGV[4]) then return found end
local made = {'user_id', ARGV[1], 'title', ARGV[2], 'created', ARGV[3], 'updated', ARGV[3]}
redis.call('HSET', KEYS[1], unpack(made))
return made
