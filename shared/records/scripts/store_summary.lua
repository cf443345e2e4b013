-- Store a summary, unless one of its turns is missing or another summary was stored meanwhile.
-- KEYS: session, turns, summary. ARGV: owner, the last query of the earlier summary or '', the number of names and
-- values of the new one, these names and values, then the beginnings of the members of its turns.
if redis.call('HGET', KEYS[1], 'user_id') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[3], 'until') or '') ~= ARGV[2] then return 0 end
local last = 3 + tonumber(ARGV[3])
for i = last + 1, #ARGV do
  local found = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[i], '(' .. ARGV[i] .. '\255', 'LIMIT', 0, 1)
  if #found == 0 then return 0 end
end
redis.call('HSET', KEYS[3], unpack(ARGV, 4, last))
return 1
