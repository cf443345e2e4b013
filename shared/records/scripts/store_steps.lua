-- Store the record of a query. KEYS: session, deleted, steps. ARGV: query id, record, why it has no answer or ''.
if redis.call('EXISTS', KEYS[1]) == 0 or deleted(redis.call('GET', KEYS[2]), ARGV[1]) then return end
if ARGV[3] ~= '' then redis.call('HSETNX', KEYS[3], ARGV[1] .. ' unanswered', ARGV[3]) end
redis.call('HSETNX', KEYS[3], ARGV[1], ARGV[2])
