-- Append the writer's next entry. KEYS: journal. ARGV: id, type, time, data, further fields.
-- Returns the id; nothing if the journal is missing: only a claim creates it.
local id = redis.call('XADD', KEYS[1], 'NOMKSTREAM', ARGV[1], 'type', ARGV[2], 'time', ARGV[3], 'data', ARGV[4],
                      unpack(ARGV, 5))
if id then publish_entry(id, ARGV[2], ARGV[3], ARGV[4]) end
return id
