-- Count the jobs of a queue that no worker has, and return the tasks of some of them.
-- KEYS  1 leases of its workers
--       2 schedules whose jobs go to the queue
--       3 when to look at each of them
--       4 how many jobs wait at limits, by task
--       5.. the streams of the queue
-- ARGV  1 consumer group
--       2 jobs to look at on each stream, at both of its ends
--       3 bytes after which no more of them are looked at
--       4 ms in which the jobs of schedules count
-- Returns how many jobs wait, how many jobs workers have, the tasks of the jobs that were sampled (one entry for each
-- job), the live workers, the tasks of schedules that fire soon, and how many jobs wait at limits, by task. Of a message
-- only what follows "task" is read.
local now = now_ms()
local waiting, held, seen, left = 0, 0, {}, tonumber(ARGV[3])
local function look(entries)
  for _, entry in ipairs(entries) do -- bound: four entries
    for n = 1, #entry[2], 2 do -- bound: the fields of an entry, as its sender wrote them
      if entry[2][n] == 'job' then
        seen[#seen + 1] = string.match(entry[2][n + 1], '"task"%s*:%s*"([^"]*)"')
        left = left - #entry[2][n + 1]
      end
    end
  end
end
for n = 5, #KEYS do -- bound: the four lanes
  local pending, last = group_of(KEYS[n], ARGV[1])
  local unread = math.max(0, redis.call('XLEN', KEYS[n]) - pending)
  waiting, held = waiting + unread, held + pending
  -- A few at a time: messages may be large.
  local oldest, newest, from, to = math.min(unread, tonumber(ARGV[2])), 0, '(' .. last, '+'
  newest = math.min(unread - oldest, tonumber(ARGV[2]))
  while oldest > 0 and left > 0 do -- bound: ARGV 2 and ARGV 3
    local entries = redis.call('XRANGE', KEYS[n], from, '+', 'COUNT', math.min(oldest, 4))
    if #entries == 0 then break end
    look(entries)
    oldest, from = oldest - #entries, '(' .. entries[#entries][1]
  end
  while newest > 0 and left > 0 do -- bound: ARGV 2 and ARGV 3
    local entries = redis.call('XREVRANGE', KEYS[n], to, '(' .. last, 'COUNT', math.min(newest, 4))
    if #entries == 0 then break end
    look(entries)
    newest, to = newest - #entries, '(' .. entries[#entries][1]
  end
end
local soon = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now + ARGV[4], 'LIMIT', 0, 1000)) do -- bound: 1,000 schedules
  local state = redis.call('HGET', KEYS[2], name)
  local read, schedule = pcall(cjson.decode, state or '')
  local of = read and type(schedule) == 'table' and schedule.of
  if type(of) == 'table' and type(of.task) == 'string' then soon[#soon + 1] = of.task end
end
return {waiting, held, seen, redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf'), soon, redis.call('HGETALL', KEYS[4])}
