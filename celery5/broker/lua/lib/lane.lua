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
-- Remove a worker from those that read a stream, unless it still has entries, which others take over.
local function remove_consumer(stream, group, name)
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, name)
  if not pending.err and not pending[1] then redis.call('XGROUP', 'DELCONSUMER', stream, group, name) end
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
-- Return whether a stream has, or ever had, an entry.
local function has_had_entries(stream)
  if redis.call('XLEN', stream) > 0 then return true end
  local info = redis.pcall('XINFO', 'STREAM', stream)
  return not info.err and to_table(info)['last-generated-id'] ~= '0-0'
end
-- Return the time in microseconds since which the oldest job of a task's waiting lists waits, of `most` lists at most, and how
-- many lists were looked at. First come the lists that had their turn longest ago, then parked ones: of a task with more
-- lists than are looked at, an older job may be in another one. The score of a job there is its priority (0 to 2, times
-- 2e15) and that time.
local function oldest_in_lists(prefix, task, most)
  local lists, oldest = {}, math.huge
  for _, fair in ipairs(redis.call('ZRANGE', prefix .. 'turns ' .. task, 0, math.floor(most / 4))) do -- bound: `most`
    local left = math.ceil(most / 2) - #lists
    for _, token in ipairs(left > 0 and redis.call('ZRANGE', prefix .. 'tokens ' .. task .. ' ' .. fair, 0, left - 1) or {}) do -- bound: `most`
      lists[#lists + 1] = fair .. ' ' .. token
    end
  end
  for _, token in ipairs(redis.call('ZRANGE', prefix .. 'full ' .. task, 0, most - #lists - 1)) do -- bound: `most`
    local fair = redis.call('ZRANGE', prefix .. 'parked ' .. task .. ' ' .. token, 0, 0)[1]
    if fair then lists[#lists + 1] = fair .. ' ' .. token end
  end
  for _, list in ipairs(lists) do -- bound: `most`
    for level = 0, 4e15, 2e15 do -- bound: the three priorities
      local from, to = string.format('%.0f', level), string.format('(%.0f', level + 2e15)
      local line = prefix .. 'line ' .. task .. ' ' .. list
      local first = redis.call('ZRANGEBYSCORE', line, from, to, 'WITHSCORES', 'LIMIT', 0, 1)
      if first[2] then oldest = math.min(oldest, first[2] - level) end
    end
  end
  return oldest, #lists
end
-- Count the jobs of a queue that no worker has, in waiting lists and among those that wait for their time. `held` and
-- `prefix`: as in admission.lua. Returns a table:
--   unlimited  how many wait in lists for nothing but a worker with a slot
--   limited    how many wait at limits, by task, and `held` how many that is
--   scheduled  how many wait for their time, or have waited for it
--   overdue    how many of those could have begun: their time has come, and nobody has moved them to a stream
--   oldest     the age in ms at `now` of the oldest job in any list, or the time since the first overdue one could have begun;
--              -1 when there is none
local LISTS = 80 -- waiting lists that are looked at for the oldest job, shared by the tasks
local function measure_lists(due, jobs, held, prefix, now)
  local found = {unlimited = 0, limited = {}, held = 0, scheduled = redis.call('ZCARD', due), oldest = -1}
  local counts, is_unlimited, expiring, left = redis.call('HGETALL', held), {}, 0, LISTS
  for _, task in ipairs(redis.call('SMEMBERS', prefix .. 'unlimited')) do is_unlimited[task] = true end -- bound: the tasks of the queue
  local since, tasks_left = math.huge, #counts / 2
  for n = 1, #counts, 2 do -- bound: the tasks whose jobs wait in lists
    local task, count = counts[n], tonumber(counts[n + 1])
    if task == ' expires' then
      expiring = count
    else
      if is_unlimited[task] then
        found.unlimited = found.unlimited + count
      else
        found.limited[#found.limited + 1] = {task, count}
        found.held = found.held + count
      end
      -- Two at least: with less a range of lists would be all of them.
      local oldest, looks = oldest_in_lists(prefix, task, math.max(2, math.floor(left / tasks_left)))
      since, left = math.min(since, oldest / 1000), left - looks
    end
    tasks_left = tasks_left - 1
  end
  found.scheduled, found.overdue = found.scheduled - expiring, redis.call('ZCOUNT', due, '-inf', now)
  -- A job that waits at a limit stands in `due`, too, when it expires: it counts above.
  local looks = found.overdue > 0 and redis.call('ZRANGEBYSCORE', due, '-inf', now, 'WITHSCORES', 'LIMIT', 0, 100) or {}
  for n = 1, #looks, 2 do -- bound: 100
    if expiring > 0 and string.sub(redis.call('HGET', jobs, looks[n]) or '', 1, 1) == 'G' then
      found.overdue = found.overdue - 1
    else
      since = math.min(since, tonumber(looks[n + 1]))
      if expiring == 0 then break end
    end
  end
  -- Of more than were looked at, some may be held; all of them are among those that wait for their time otherwise.
  if expiring > 0 then found.overdue = math.max(0, math.min(found.overdue, found.scheduled)) end
  if since < math.huge then found.oldest = math.max(0, math.floor(now - since)) end
  return found
end
-- Return the backlog of a queue: how many jobs no worker has whose time has come. `waiting`: how many each of its lanes has
-- that no worker has. `lists`: what measure_lists has found.
local function backlog_of(waiting, lists)
  local backlog = lists.unlimited + lists.held + lists.overdue
  for lane = 1, #waiting do backlog = backlog + math.max(0, waiting[lane]) end -- bound: the four lanes
  return backlog
end
-- Return what the flow of a queue is measured by: the time, how many attempts have ended, when the last one did and since when
-- they are counted (count_ended.lua counts), and the earlier looks that were kept; of what is not known, nothing.
local function flow_of(jobs, now)
  local found = redis.pcall('HMGET', jobs .. ':flow', 'ended', 'at', 'since', 'looks')
  if found.err then found = {} end
  return {now, found[1] or '', found[2] or '', found[3] or '', found[4] or ''}
end
