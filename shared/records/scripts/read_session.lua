-- Return the session, a page of the turns of each respondent, and the steps of A's turns on that page.
-- The first page also has the steps of queries without an answer.
-- KEYS: session, turns of each respondent, steps. ARGV: size of a page, then the lower bound for each respondent.
local found = {redis.call('HGETALL', KEYS[1])}
for i = 2, #ARGV do
  found[i] = redis.call('ZRANGEBYLEX', KEYS[i], ARGV[i], '+', 'LIMIT', 0, ARGV[1])
end
local steps, told = KEYS[#KEYS], {}
local function tell(id)
  for _, what in ipairs({'', ' critique', ' pairwise', ' reward', ' unanswered'}) do
    local value = redis.call('HGET', steps, id .. what)
    if value then told[#told + 1] = id .. what told[#told + 1] = value end
  end
end
for _, member in ipairs(found[2]) do
  local ms, seq = string.match(member, '^(%d+)-(%d+) ')
  if ms then tell(string.format('%.0f-%.0f', ms, seq)) end
end
if ARGV[2] == '-' then
  local unanswered = redis.call('HSCAN', steps, 0, 'MATCH', '* unanswered', 'COUNT', 100000)[2]
  for i = 1, #unanswered, 2 do tell(string.match(unanswered[i], '^%S*')) end
end
found[#KEYS] = told
return found
