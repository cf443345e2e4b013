-- Count a vote instead of the previous vote on the same answer, and advance the group to the vote's entry.
-- KEYS: stream, vote, counts, sums. ARGV: group, entry id, kind ('' for another respondent's answer), vote id,
-- reward ('' for a withdrawn vote), seconds until a vote expires, most kinds, the kind of all others.
local function later(a, b)
  local am, as = string.match(a, '^(%d+)%-(%d+)$')
  local bm, bs = string.match(b, '^(%d+)%-(%d+)$')
  if not bm then return true end
  if not am then return false end
  am, as, bm, bs = tonumber(am), tonumber(as), tonumber(bm), tonumber(bs)
  return am > bm or (am == bm and as > bs)
end
if ARGV[3] ~= '' then
  local old = redis.call('HMGET', KEYS[2], 'id', 'kind', 'reward')
  if not old[1] or later(ARGV[4], old[1]) then
    if old[1] and old[3] ~= '' then
      if redis.call('HINCRBY', KEYS[3], old[2], -1) <= 0 then
        redis.call('HDEL', KEYS[3], old[2])
        redis.call('HDEL', KEYS[4], old[2])
      else
        redis.call('HINCRBYFLOAT', KEYS[4], old[2], -old[3])
      end
    end
    local kind = ARGV[3]
    if redis.call('HEXISTS', KEYS[3], kind) == 0 and redis.call('HLEN', KEYS[3]) >= tonumber(ARGV[7]) then
      kind = ARGV[8]
    end
    if ARGV[5] ~= '' then
      redis.call('HINCRBY', KEYS[3], kind, 1)
      redis.call('HINCRBYFLOAT', KEYS[4], kind, ARGV[5])
    end
    redis.call('HSET', KEYS[2], 'id', ARGV[4], 'kind', kind, 'reward', ARGV[5])
    redis.call('EXPIRE', KEYS[2], ARGV[6])
  end
end
for _, row in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #row, 2 do group[row[i]] = row[i + 1] end
  if group['name'] == ARGV[1] and later(ARGV[2], group['last-delivered-id']) then
    redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[2])
  end
end
return 1
