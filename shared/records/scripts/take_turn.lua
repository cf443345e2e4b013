-- Check whether a query is the head of its queue; else store the inbox to notify. KEYS: queue, inboxes, stream.
-- ARGV: member, inbox, group. Returns '' for the head, else the member before it.
redis.call('ZADD', KEYS[1], 'NX', 0, ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
local mine = redis.call('ZSCORE', KEYS[1], ARGV[1]) == '-1'
while not mine do
  local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  mine = first == ARGV[1]
  if not mine then
    if not finished(KEYS[3], ARGV[3], first) then
      redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
      redis.call('EXPIRE', KEYS[2], 86400)
      return first
    end
    redis.call('ZREM', KEYS[1], first)
    redis.call('HDEL', KEYS[2], first)
  end
end
-- The running query stays first, also when a replica reads an earlier query later.
redis.call('ZADD', KEYS[1], -1, ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return ''
