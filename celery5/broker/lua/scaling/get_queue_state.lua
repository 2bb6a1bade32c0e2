-- Return the counts of a queue, and its workers.
-- KEYS  1 scheduled jobs by time
--       2 dead-letter queue
--       3 leases of its workers
--       4 the live job of each key
--       5 how many jobs wait at limits
--       6 prefix of the waiting lists
--       7 where its jobs are
--       8 by which tasks workers were taken down
--       9 workers that were lost in the last hour, by when
--       10 what these had begun
--       11.. streams of its lanes
-- ARGV  1 consumer group
-- Returns how many jobs wait on each lane (on the normal one with those in waiting lists that wait for nothing but a worker
-- with a slot), how many jobs of all lanes workers have, how many wait for their time, in how
-- many ms the next of these is due (-1 when there is none), how many are dead, for how many ms the oldest of these has
-- been dead (-1 when there is none), how many keys live jobs have, and the workers: the name of each, the ms that its lease
-- still lasts (0 when it has lapsed), how many jobs it has, for how many ms its lease is over (-1 when it is not, or it has
-- left, or is being recovered), and the part of a ms in the lease, in 4096ths: above 0 when its sidecar has renewed it. Then each task whose jobs wait at limits, and how many do.
-- Last, the age in ms of the oldest job of the backlog (-1 when there is none), how many of those that wait for their time are
-- overdue, the backlog: the jobs that no worker has and whose time has come, and what its flow is measured by.
-- Then what KEYS 8 has.
-- Then how many workers were lost, and of the last two hundred the name, when in ms since 1970, what it had begun, packed, and
-- 0 if none of its dead letters is left, 1 if some are, -1 if that is not known.
-- Last, each task with jobs that wait for a worker with what they take, and how many do: those of the lists of foreign jobs
-- (lib/foreign.lua) with a signature that says so, by a `!` at its end. And each task with jobs that wait for a worker
-- whose code has it, and how many do: those of the list of no signature. And each task with jobs that wait for a worker whose
-- code takes their arguments, and how many do: those of the other lists. Then 1 if jobs are, or ever were, on its streams.
local due, dead, leases, unique = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now = now_ms()
local held, all, waiting, workers, oldest_waiting, has_had_jobs = {}, 0, {}, {}, -1, false
for lane = 11, #KEYS do -- bound: the four lanes
  local here = 0
  for _, consumer in ipairs(consumers_of(KEYS[lane], ARGV[1])) do -- bound: the workers of the queue
    held[consumer.name], here = (held[consumer.name] or 0) + consumer.pending, here + consumer.pending
  end
  waiting[lane - 10], all = redis.call('XLEN', KEYS[lane]) - here, all + here
  local _, age = measure_lane(KEYS[lane], ARGV[1], now)
  oldest_waiting = math.max(oldest_waiting, age)
  has_had_jobs = has_had_jobs or has_had_entries(KEYS[lane])
end
local lists = measure_lists(due, KEYS[7], KEYS[5], KEYS[6], now)
local backlog = backlog_of(waiting, lists)
waiting[1] = waiting[1] + lists.unlimited
local standing = redis.call('ZRANGE', leases, 0, -1, 'WITHSCORES')
for n = 1, #standing, 2 do -- bound: the workers of the queue
  local name = standing[n]
  local ends = tonumber(standing[n + 1])
  local over = ends > 0 and ends <= now and math.floor(now - ends) or -1
  workers[#workers + 1] = {name, math.max(0, math.ceil(ends - now)), held[name] or 0, over, math.floor(ends % 1 * 4096 + 0.5)}
  held[name] = nil
end
for name, count in pairs(held) do -- bound: the workers of the queue; jobs of nobody: they are about to be recovered
  if count > 0 then workers[#workers + 1] = {name, 0, count, -1, 0} end
end
local since, until_now, lost = '(' .. string.format('%.0f', now - 3600000), string.format('%.0f', now), {}
local found = redis.call('ZRANGE', KEYS[9], until_now, since, 'BYSCORE', 'REV', 'LIMIT', 0, 200, 'WITHSCORES')
-- An older worker notes no ids of its dead letters.
local function has_dead_left(packed)
  if not string.find(packed, '"last_dead"', 1, true) then return -1 end
  local is_read, work = pcall(cjson.decode, packed)
  local entries = is_read and redis.pcall('XRANGE', dead, tostring(work.first_dead), tostring(work.last_dead), 'COUNT', 1)
  return entries and not entries.err and #entries or -1
end
for n = 1, #found, 2 do -- bound: two hundred, which is how many are noted
  local packed = redis.call('HGET', KEYS[10], found[n]) or ''
  lost[#lost + 1] = {found[n], found[n + 1], packed, has_dead_left(packed)}
end
local lacking, unknown, unfit, foreign = {}, {}, {}, redis.call('HGETALL', KEYS[7] .. ':foreign')
for n = 1, #foreign, 2 do -- bound: the tasks of the application
  local counts = {[lacking] = 0, [unknown] = 0, [unfit] = 0}
  for signatures in string.gmatch(foreign[n + 1], '[^ ]+') do -- bound: FOREIGN_LISTS
    local kind = signatures == '-' and unknown or string.find(signatures, '!', 1, true) and lacking or unfit
    counts[kind] = counts[kind] + redis.call('ZCARD', KEYS[7] .. ':foreign:' .. foreign[n] .. ' ' .. signatures)
  end
  for kind, count in pairs(counts) do -- bound: three
    if count > 0 then kind[#kind + 1] = {foreign[n], count} end
  end
end
local next_one, oldest = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES'), redis.call('XRANGE', dead, '-', '+', 'COUNT', 1)
return {
  waiting,
  all,
  lists.scheduled,
  next_one[2] and math.max(0, math.ceil(next_one[2] - now)) or -1,
  redis.call('XLEN', dead),
  oldest[1] and math.max(0, now - tonumber(string.match(oldest[1][1], '^%d+'))) or -1,
  redis.call('HLEN', unique),
  workers,
  lists.limited,
  math.max(oldest_waiting, lists.oldest),
  lists.overdue,
  backlog,
  flow_of(KEYS[7], now),
  redis.call('HGETALL', KEYS[8]),
  redis.call('ZCOUNT', KEYS[9], since, until_now),
  lost,
  lacking,
  unknown,
  unfit,
  has_had_jobs and 1 or 0,
}
