-- Keeps what is thought of an answer whose turn is there. KEYS: session, deleted, steps, turns. ARGV: query id, how its
-- turn begins, what it is, value.
if redis.call('EXISTS', KEYS[1]) == 0 or deleted(redis.call('GET', KEYS[2]), ARGV[1]) then return end
if #redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[2], '(' .. ARGV[2] .. '\255', 'LIMIT', 0, 1) == 0 then return end
redis.call('HSET', KEYS[3], ARGV[1] .. ' ' .. ARGV[3], ARGV[4])
