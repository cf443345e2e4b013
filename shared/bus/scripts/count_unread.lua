-- Count the entries after an id, at most 10,000. Redis cannot report a group's lag after an unread entry was deleted.
-- KEYS: stream. ARGV: id.
return #redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', 10000)
