-- Count the jobs of a queue, and return the age of the oldest one that no worker has and that could run.
-- KEYS  1 scheduled jobs by time
--       2 dead-letter queue
--       3 how many jobs wait at limits
--       4 live runs of workflows
--       5 prefix of the waiting lists
--       6 where the queue's jobs are
--       7 leases of its workers
--       8 by which tasks workers were taken down
--       9 workers that were lost in the last hour, by when
--       10.. streams of its lanes
-- ARGV  1 consumer group
-- Returns how many jobs are on the streams, or in waiting lists for nothing but a worker with a slot; how many of those a
-- worker has, how many wait for their time, how many are dead, how many wait at limits, the age in ms of the oldest job
-- of the backlog (-1 when there is none), how many runs are live, how many scheduled jobs are overdue, and the backlog: the
-- jobs that no worker has and whose time has come. How many workers live. Then each
-- task whose jobs wait at limits, and how many do. Then what KEYS 8 has. Last, what the queue's flow is measured by.
-- Last, how many workers were lost in the last hour, those included whose lease is over and whose jobs nobody has put back
-- yet, and the name of the last of them and when in ms since 1970: twenty of each at most. Last, the name of each worker whose
-- lease its sidecar has renewed, with the part of a ms in the lease, in 4096ths: of five hundred live workers at most.
local there, running, oldest, waiting = 0, 0, -1, {}
local now = now_ms()
for n = 10, #KEYS do -- bound: the four lanes
  local pending, age = measure_lane(KEYS[n], ARGV[1], now)
  running, oldest = running + pending, math.max(oldest, age)
  local length = redis.call('XLEN', KEYS[n])
  there, waiting[n - 9] = there + length, length - pending
end
local lists = measure_lists(KEYS[1], KEYS[6], KEYS[3], KEYS[5], now)
local since, until_now = '(' .. string.format('%.0f', now - 3600000), string.format('%.0f', now)
-- Leases that nobody has recovered for an hour, as on a queue that no worker reads, are forgotten, too.
local lapsed = redis.call('ZRANGE', KEYS[7], until_now, since, 'BYSCORE', 'REV', 'LIMIT', 0, 20, 'WITHSCORES')
local lost = redis.call('ZRANGE', KEYS[9], until_now, since, 'BYSCORE', 'REV', 'LIMIT', 0, 20, 'WITHSCORES')
for n = 1, #lapsed do lost[#lost + 1] = lapsed[n] end -- bound: forty
local silent = {}
local live = redis.call('ZRANGE', KEYS[7], '(' .. until_now, '+inf', 'BYSCORE', 'LIMIT', 0, 500, 'WITHSCORES')
for n = 1, #live, 2 do -- bound: five hundred
  local part = math.floor(tonumber(live[n + 1]) % 1 * 4096 + 0.5)
  if part > 0 then silent[#silent + 1] = {live[n], part} end
end
return {
  there + lists.unlimited,
  running,
  lists.scheduled,
  redis.call('XLEN', KEYS[2]),
  lists.held,
  math.max(oldest, lists.oldest),
  redis.call('ZCARD', KEYS[4]),
  lists.overdue,
  backlog_of(waiting, lists),
  redis.call('ZCOUNT', KEYS[7], '(' .. string.format('%.0f', now), '+inf'),
  lists.limited,
  redis.call('HGETALL', KEYS[8]),
  flow_of(KEYS[6], now),
  redis.call('ZCOUNT', KEYS[9], since, until_now) + redis.call('ZCOUNT', KEYS[7], since, until_now),
  lost,
  silent,
}
