-- Store a judgement of an answer that has a turn. KEYS: session, deleted, steps, turns. ARGV: query id, the beginning
-- of the turn's member, type, value.
if redis.call('EXISTS', KEYS[1]) == 0 or deleted(redis.call('GET', KEYS[2]), ARGV[1]) then return end
if #redis.call('ZRANGEBYLEX', KEYS[4], '[' .. ARGV[2], '(' .. ARGV[2] .. '\255', 'LIMIT', 0, 1) == 0 then return end
redis.call('HSET', KEYS[3], ARGV[1] .. ' ' .. ARGV[3], ARGV[4])
