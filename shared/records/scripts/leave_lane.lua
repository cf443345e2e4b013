-- Remove a query from its session's queue. KEYS: queue, inboxes. ARGV: member.
-- Returns the inbox that waits for the next query, or the empty string.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
return first and redis.call('HGET', KEYS[2], first) or ''
