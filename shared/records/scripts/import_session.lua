-- Add the turns and steps that the session does not have. KEYS: session, turns of each respondent, steps.
-- ARGV: user, title, created, updated, whether it is pinned, its settings or nothing, the chosen turn or nothing, then
-- a number of fields of steps, so many names and values, per respondent a number of turns, and so many ids and turns.
-- Returns -1 when the session is another user's, else the number of turns that were added.
local owner = redis.call('HGET', KEYS[1], 'user_id')
if owner and owner ~= ARGV[1] then return -1 end
-- An existing session may have newer values: leave them.
if not owner and ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'tip', ARGV[7]) end
redis.call('HSETNX', KEYS[1], 'user_id', ARGV[1])
redis.call('HSETNX', KEYS[1], 'title', ARGV[2])
redis.call('HSETNX', KEYS[1], 'created', ARGV[3])
if ARGV[5] == '1' then redis.call('HSETNX', KEYS[1], 'pinned', '1') end
if ARGV[6] ~= '' then redis.call('HSETNX', KEYS[1], 'settings', ARGV[6]) end
if tonumber(redis.call('HGET', KEYS[1], 'updated') or '0') < tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], 'updated', ARGV[4])
end
local added, at = 0, 9
for _ = 1, tonumber(ARGV[8]) do
  redis.call('HSETNX', KEYS[#KEYS], ARGV[at], ARGV[at + 1])
  at = at + 2
end
for k = 2, #KEYS - 1 do
  local number = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, number do
    added = added + add_turn(KEYS[k], ARGV[at], ARGV[at + 1])
    at = at + 2
  end
end
return added
