-- Name a session after one of its turns, unless it has a name or the turn was removed. KEYS: session, turns.
-- ARGV: the beginning of the turn's member, title. Returns 1 if it was named.
local there = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[1], '(' .. ARGV[1] .. '\255', 'LIMIT', 0, 1)
if #there == 0 or redis.call('HGET', KEYS[1], 'named') == '1' then return 0 end
redis.call('HSET', KEYS[1], 'title', ARGV[2], 'named', '1')
return 1
