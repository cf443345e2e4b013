-- Define deleted: return whether a query was accepted before its session was deleted. mark: the last query before
-- that.
local function deleted(mark, id)
  return mark and (mark == id or before(id, mark))
end
