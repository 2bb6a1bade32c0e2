-- Record ids: a part of the scripts that read or write the log of a stream: they begin with it.
-- An id is `<ms>-<n>`: n is the number of the record in its partition, from 1. So the records between two ids can be
-- counted by subtraction.
-- Return the two parts of an id as numbers.
local function split_id(id)
  local ms, n = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms) or 0, tonumber(n) or 0
end
local function make_id(ms, n) return string.format('%.0f-%.0f', ms, n) end
-- Return whether the first id is before the second one.
local function is_before(one, other)
  local ms, n = split_id(one)
  local other_ms, other_n = split_id(other)
  return ms < other_ms or (ms == other_ms and n < other_n)
end
-- Return the last id that was ever in a log, 0-0 for none.
local function last_id(log)
  local info = redis.pcall('XINFO', 'STREAM', log)
  if info.err then return '0-0' end
  for n = 1, #info, 2 do -- bound: the fields of the reply
    if info[n] == 'last-generated-id' then return info[n + 1] end
  end
end
-- Return the cursor in front of the first record from `first` on: $ is the end of the log.
local function cursor_before(log, first)
  local entry = first ~= '$' and redis.call('XRANGE', log, first, '+', 'COUNT', 1)[1]
  if not entry then return last_id(log) end
  local ms, n = split_id(entry[1])
  if n > 0 then return make_id(ms, n - 1) end
  return ms > 0 and make_id(ms - 1, 0) or '0-0' -- a foreign entry, which has no number
end
