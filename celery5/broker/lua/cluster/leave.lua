-- Let a worker leave a queue. Jobs that it still holds are recovered by other workers at once.
-- KEYS  1 leases of its workers
--       2 outbox of its runs
--       3.. streams of its lanes
-- ARGV  1 consumer group
--       2 this worker's name in it
-- Returns how many lanes it still held jobs of.
remove_consumer(KEYS[2], ARGV[1], ARGV[2])
local held = 0
for n = 3, #KEYS do -- bound: the streams of the queue
  local pending = redis.pcall('XPENDING', KEYS[n], ARGV[1], '-', '+', 1, ARGV[2])
  if not pending.err then held = held + #pending end
end
if held == 0 then
  for n = 3, #KEYS do redis.pcall('XGROUP', 'DELCONSUMER', KEYS[n], ARGV[1], ARGV[2]) end -- bound: the streams of the queue
  redis.call('ZREM', KEYS[1], ARGV[2])
  return 0
end
-- A lease below 0 says that its recovery is under way and stays: it must settle nothing.
if (tonumber(redis.call('ZSCORE', KEYS[1], ARGV[2]) or 0)) >= 0 then redis.call('ZADD', KEYS[1], 0, ARGV[2]) end
return held
