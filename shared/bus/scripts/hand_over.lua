-- Make a leaving consumer's entries claimable at once, 500 at a time, then remove the consumer.
-- The interrupted delivery does not count as an attempt.
-- KEYS: stream. ARGV: group, consumer, unowned consumer.
-- Returns the number of entries moved; 0 when there were none and the consumer was removed.
local p = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 500, ARGV[2])
for _, row in ipairs(p) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, row[1],
             'IDLE', 1000000000, 'RETRYCOUNT', math.max(row[4] - 1, 0), 'JUSTID')
end
if #p == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2]) end
return #p
