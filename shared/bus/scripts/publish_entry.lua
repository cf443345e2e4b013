-- Define publish_entry: publish an entry that a script has added to KEYS[1], on the channel of that name.
-- A large entry is only announced: Redis would store a copy of it for every subscriber. A user that may not publish has
-- added the entry all the same.
local function publish_entry(id, kind, time, data)
  local message = id
  if #data <= 8192 then message = id .. ' ' .. kind .. ' ' .. time .. ' ' .. data end
  redis.pcall('SPUBLISH', KEYS[1], message)
end
