-- Add an answer to its pair, and choose the respondent whose entry judges the pair.
-- KEYS: pair, waiting. ARGV: respondent, answer, query id, limit, seconds, now ms, key prefix.
-- Returns both answers (A, B) to the respondent whose entry judges the pair, else nothing; then the ids given up.
local side, other = ARGV[1], ARGV[1] == 'A' and 'B' or 'A'
if redis.call('HGET', KEYS[1], 'closed') then return {false, false} end
redis.call('HSETNX', KEYS[1], side, ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[5])
if redis.call('HEXISTS', KEYS[1], other) == 0 then
  redis.call('ZADD', KEYS[2], 'NX', ARGV[6], ARGV[3])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[6] - ARGV[5] * 1000)
  redis.call('EXPIRE', KEYS[2], ARGV[5])
  local reply = {false, false}
  while redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[4]) do
    local oldest = redis.call('ZPOPMIN', KEYS[2])[1]
    redis.call('DEL', ARGV[7] .. oldest)
    reply[#reply + 1] = oldest
  end
  return reply
end
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('HSETNX', KEYS[1], 'judge', side)
if redis.call('HGET', KEYS[1], 'judge') ~= side then return {false, false} end
return {redis.call('HGET', KEYS[1], 'A'), redis.call('HGET', KEYS[1], 'B')}
