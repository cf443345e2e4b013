-- Store a turn, unless its session was deleted meanwhile. KEYS: session, turns, deleted. ARGV: query id, turn, now ms,
-- whether users see its answer (0 or 1).
if redis.call('EXISTS', KEYS[1]) == 0 or deleted(redis.call('GET', KEYS[3]), ARGV[1]) then return end
if add_turn(KEYS[2], ARGV[1], ARGV[2]) > 0 and ARGV[4] == '1' then
  redis.call('HSET', KEYS[1], 'updated', ARGV[3])
  -- The newest turn is shown until the user chooses another one.
  redis.call('HDEL', KEYS[1], 'tip')
end
