-- Release a lease that one process holds at a time, and ask for it no more.
-- KEYS  1 the lease
--       2.. one that may be missing: the processes that ask for it
-- ARGV  1 the process
-- Returns 1, or 0 when the process did not hold it. Safe to repeat.
if KEYS[2] then redis.call('ZREM', KEYS[2], ARGV[1]) end
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
