-- Let a worker leave a queue. What it still holds, if anything, is for others to recover at once.
-- KEYS  1 stream of the queue
--       2 leases of its workers
-- ARGV  1 consumer group
--       2 this worker's name in it
-- Gives how many jobs it still held.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])
if pending.err or #pending == 0 then
  redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZREM', KEYS[2], ARGV[2])
  return 0
end
-- A lease below 0 says that its recovery is under way and stays: it must settle nothing (I4).
if (tonumber(redis.call('ZSCORE', KEYS[2], ARGV[2]) or 0)) >= 0 then redis.call('ZADD', KEYS[2], 0, ARGV[2]) end
return #pending
