-- Define add_turn: add a turn that is missing; return how many were added.
local function add_turn(turns, id, value)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if not ms then return 0 end
  local front = string.format('%015.0f-%010.0f ', ms, seq)
  if #redis.call('ZRANGEBYLEX', turns, '[' .. front, '(' .. front .. '\255', 'LIMIT', 0, 1) > 0 then return 0 end
  return redis.call('ZADD', turns, 0, front .. value)
end
