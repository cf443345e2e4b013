-- Whether a query belongs to a session that was deleted: `mark` is the last query that did. Both are ids of one stream.
local function deleted(mark, id)
  return mark and (mark == id or before(id, mark))
end
