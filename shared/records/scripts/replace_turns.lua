-- Remove turns from a session and add others. Steps of the removed turns, and a summary that covers one of them, are
-- removed too. KEYS: session, summary, steps, then each respondent's turns. ARGV: number of ids, the ids, then ids and
-- turns of A to add.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
local number = tonumber(ARGV[1])
local reach = redis.call('HGET', KEYS[2], 'until')
-- Only a change of a turn that the user sees resets the choice of a version.
local function changed(id)
  redis.call('HDEL', KEYS[1], 'tip')
  if reach and deleted(reach, id) then redis.call('DEL', KEYS[2]) end
end
for i = 2, 1 + number do
  local ms, seq = string.match(ARGV[i], '^(%d+)-(%d+)$')
  local front = string.format('%015.0f-%010.0f ', ms, seq)
  for k = 4, #KEYS do
    if redis.call('ZREMRANGEBYLEX', KEYS[k], '[' .. front, '(' .. front .. '\255') > 0 and k == 4 then
      changed(ARGV[i])
    end
  end
  redis.call('HDEL', KEYS[3], ARGV[i], ARGV[i] .. ' unanswered', ARGV[i] .. ' critique', ARGV[i] .. ' pairwise',
             ARGV[i] .. ' reward')
end
for i = 2 + number, #ARGV, 2 do
  if add_turn(KEYS[4], ARGV[i], ARGV[i + 1]) > 0 then changed(ARGV[i]) end
end
