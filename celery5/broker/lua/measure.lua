-- Count what is in a queue.
-- KEYS  1 scheduled jobs by time
--       2 dead-letter queue
--       3.. streams of its lanes
-- ARGV  1 consumer group
-- Gives how many jobs are on the streams, how many of those a worker has, how many wait for their time, how many are
-- dead.
local there, held = 0, 0
for n = 3, #KEYS do
  local pending = redis.pcall('XPENDING', KEYS[n], ARGV[1])
  if not pending.err then held = held + pending[1] end
  there = there + redis.call('XLEN', KEYS[n])
end
return {there, held, redis.call('ZCARD', KEYS[1]), redis.call('XLEN', KEYS[2])}
