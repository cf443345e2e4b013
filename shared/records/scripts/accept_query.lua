-- Accept a query once: its entry, its record, and its places in the session's list and queues.
-- KEYS: stream, once-key, prefix of the records; for a session also its list of queries and its queues, A's first.
-- ARGV: limit of unfinished queries, seconds, group of A, ms for the answer, number of words of the record, these
-- words, then the entry's words. The script sets the deadline, because the caller's clock may differ from Redis'
-- clock. Returns the id, the group's unfinished queries (-1: Redis cannot count them), and the record's times; or the
-- id and the record of an earlier query with that once-key; or nothing if the session has too many unfinished queries.
-- A query accepted into an empty session queue may start at once. Its entry says so, and the reader need not check.
local function unfinished(stream, group)
  for _, row in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local g = {}
    for i = 1, #row, 2 do g[row[i]] = row[i + 1] end
    if g['name'] == group then return g['lag'] and g['pending'] + g['lag'] or -1 end
  end
  return redis.call('XLEN', stream)
end
local earlier = redis.call('GET', KEYS[2])
if earlier then return {earlier, redis.call('HGETALL', KEYS[3] .. earlier)} end
-- A key of another type raises an error here, before the first write.
local size = {}
for i = 4, #KEYS do size[i] = redis.call('ZCARD', KEYS[i]) end
local most = tonumber(ARGV[1])
if KEYS[5] and size[5] >= most then
  -- Finished queries that were never removed are the oldest: remove them from the front.
  for _, member in ipairs(redis.call('ZRANGE', KEYS[5], 0, 9)) do
    if finished(KEYS[1], ARGV[3], member) then redis.call('ZREM', KEYS[5], member) end
  end
  size[5] = redis.call('ZCARD', KEYS[5])
  if size[5] >= most then return {} end
end
local words, time = tonumber(ARGV[5]), redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local accepted, deadline = string.format('%.0f', now), string.format('%.0f', now + ARGV[4])
local entry, turn = {'deadline', deadline, unpack(ARGV, 6 + words)}, {}
for i = 5, #KEYS do
  if size[i] == 0 then turn[i] = i == 5 and 'A' or 'B' end
end
if turn[5] or turn[6] then
  table.insert(entry, 'turn')
  table.insert(entry, (turn[5] or '') .. (turn[6] or ''))
end
local id = redis.call('XADD', KEYS[1], '*', unpack(entry))
redis.call('SET', KEYS[2], id, 'EX', ARGV[2])
redis.call('HSET', KEYS[3] .. id, 'accepted', accepted, 'deadline', deadline, unpack(ARGV, 6, 5 + words))
redis.call('EXPIRE', KEYS[3] .. id, ARGV[2])
if KEYS[4] then
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  -- An answer may come late, and its data stays from then on.
  local kept = 2 * tonumber(ARGV[2])
  if size[4] > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', ms) end
  redis.call('ZADD', KEYS[4], string.format('%.0f', ms + kept * 1000), id)
  if size[4] == 0 or redis.call('TTL', KEYS[4]) < kept then redis.call('EXPIRE', KEYS[4], kept) end
  local member = string.format('%015.0f-%010.0f', ms, seq)
  for i = 5, #KEYS do
    redis.call('ZADD', KEYS[i], turn[i] and -1 or 0, member)
    redis.call('EXPIRE', KEYS[i], 86400)
  end
end
return {id, unfinished(KEYS[1], ARGV[3]), accepted, deadline}
