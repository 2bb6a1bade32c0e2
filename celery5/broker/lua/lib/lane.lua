-- Lane: the stream of one lane of a queue. A part of the scripts that measure queues: they begin with it.
-- Return how many entries workers have, and the age in ms at `now` of the oldest entry that no worker has, -1 when
-- there is none. An entry's id begins with the time, in ms, at which it came. Costs the same however long the stream is.
local function measure_lane(stream, group, now)
  local groups, pending, last = redis.pcall('XINFO', 'GROUPS', stream), 0, '0-0'
  for _, one in ipairs(groups.err and {} or groups) do -- bound: the consumer groups of a stream, one
    local field = {}
    for n = 1, #one, 2 do field[one[n]] = one[n + 1] end -- bound: the fields of one answer
    if field.name == group then pending, last = field.pending, field['last-delivered-id'] end
  end
  local first = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  return pending, first and math.max(0, now - tonumber(string.match(first[1], '^%d+'))) or -1
end
