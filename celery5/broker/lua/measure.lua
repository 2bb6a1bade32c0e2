-- Count what is in a queue.
-- KEYS  1 stream of the queue
--       2 scheduled jobs by time
--       3 dead-letter queue
-- ARGV  1 consumer group
-- Gives how many jobs are on the stream, how many of those a worker has, how many wait for their time, how many are dead.
local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1])
local held = 0
if not pending.err then held = pending[1] end
return {redis.call('XLEN', KEYS[1]), held, redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3])}
