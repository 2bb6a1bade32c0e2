-- Release a lease that one process holds at a time.
-- KEYS  1 the lease
-- ARGV  1 the process
-- Returns 1, or 0 when the process did not hold it. Safe to repeat.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
