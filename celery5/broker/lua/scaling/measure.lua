-- Count the jobs of a queue, and return the age of the oldest job that waits.
-- KEYS  1 scheduled jobs by time
--       2 dead-letter queue
--       3 how many jobs wait at limits
--       4 live runs of workflows
--       5 prefix of the waiting lists
--       6.. streams of its lanes
-- ARGV  1 consumer group
-- Returns how many jobs are on the streams, or in waiting lists for nothing but a worker with a slot; how many of those a
-- worker has, how many wait for their time, how many are dead, how many wait at limits, the age in ms of the oldest of the
-- first ones that no worker has, -1 when there is none, and how many runs are live.
local there, held, oldest = 0, 0, -1
local now = now_ms()
for n = 6, #KEYS do -- bound: the four lanes
  local pending, age = measure_lane(KEYS[n], ARGV[1], now)
  held, oldest = held + pending, math.max(oldest, age)
  there = there + redis.call('XLEN', KEYS[n])
end
local _, unlimited, age = measure_unlimited(KEYS[5], KEYS[3], now)
there, oldest = there + unlimited, math.max(oldest, age)
local due, limited, at_limits = redis.call('ZCARD', KEYS[1]), 0, redis.call('HGETALL', KEYS[3])
for n = 1, #at_limits, 2 do -- bound: the tasks whose jobs wait at limits
  if at_limits[n] == ' expires' then due = due - at_limits[n + 1] else limited = limited + at_limits[n + 1] end
end
return {there, held, due, redis.call('XLEN', KEYS[2]), limited - unlimited, oldest, redis.call('ZCARD', KEYS[4])}
