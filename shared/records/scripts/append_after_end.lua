-- Append an entry after the terminal one, once. KEYS: journal. ARGV: once-name, type, time, data, terminal types.
-- Returns its id; 'gone' when the journal has expired; 'open' while the response is being written. An entry with an id
-- of the clock would then make Redis refuse the writer's smaller ids. The script reads from the end to the writer's
-- last entry, because a journal may have thousands of entries.
local at, ended = '+', nil
for _ = 1, 500 do
  local entry = redis.call('XREVRANGE', KEYS[1], at, '-', 'COUNT', 1)[1]
  if not entry then break end
  local f = {}
  for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
  if f['once'] == ARGV[1] then return entry[1] end
  at, ended = '(' .. entry[1], f['once'] ~= nil
  for i = 5, #ARGV do ended = ended or f['type'] == ARGV[i] end
  if #string.match(entry[1], '^%d+') < 13 then break end
end
if ended == nil then return 'gone' end
if not ended then return 'open' end
local id = redis.call('XADD', KEYS[1], '*', 'once', ARGV[1], 'type', ARGV[2], 'time', ARGV[3], 'data', ARGV[4])
publish_entry(id, ARGV[2], ARGV[3], ARGV[4])
return id
