-- Lane: the stream of one lane of a queue, and its consumer group. A part of the scripts that measure lanes: they begin with it.
-- Put a reply of names and values into a table.
local function to_table(reply)
  local fields = {}
  for n = 1, #reply, 2 do fields[reply[n]] = reply[n + 1] end -- bound: the fields of one answer
  return fields
end
-- Return the consumers of a lane, each a table; none where there is no stream.
local function consumers_of(stream, group)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  if consumers.err then return {} end
  for n, consumer in ipairs(consumers) do consumers[n] = to_table(consumer) end -- bound: the workers of the queue
  return consumers
end
-- Return how many entries workers have, and the last entry that a worker has read.
local function group_of(stream, group)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, one in ipairs(groups.err and {} or groups) do -- bound: the consumer groups of a stream, one
    local fields = to_table(one)
    if fields.name == group then return fields.pending, fields['last-delivered-id'] end
  end
  return 0, '0-0'
end
-- Return how many entries workers have, and the age in ms at `now` of the oldest entry that no worker has, -1 when
-- there is none. An entry's id begins with the time in ms at which it was added. The cost does not grow with the stream.
local function measure_lane(stream, group, now)
  local pending, last = group_of(stream, group)
  local first = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
  return pending, first and math.max(0, now - tonumber(string.match(first[1], '^%d+'))) or -1
end
-- Return the tasks whose jobs wait in waiting lists for nothing but a worker with a slot, each with how many do, how many
-- that are together, and the age in ms at `now` of the oldest, -1 when there is none. `prefix` and `held`: as in
-- admission.lua. The score of a job there is its priority (0 to 2, times 2e15) and its time in microseconds.
local function measure_unlimited(prefix, held, now)
  local tasks, sum, oldest = {}, 0, -1
  for _, task in ipairs(redis.call('SMEMBERS', prefix .. 'unlimited')) do -- bound: the tasks of the queue
    tasks[task] = tonumber(redis.call('HGET', held, task) or 0)
    sum = sum + tasks[task]
    for level = 0, 4e15, 2e15 do -- bound: the three priorities
      local to = string.format('(%.0f', level + 2e15)
      local line = prefix .. 'line ' .. task .. '  '
      local first = redis.call('ZRANGEBYSCORE', line, string.format('%.0f', level), to, 'WITHSCORES', 'LIMIT', 0, 1)
      if first[2] then oldest = math.max(oldest, now - (first[2] - level) / 1000, 0) end
    end
  end
  return tasks, sum, math.floor(oldest)
end
