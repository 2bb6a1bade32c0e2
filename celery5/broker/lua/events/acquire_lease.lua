-- Acquire or renew a lease that one process holds at a time.
-- KEYS  1 the lease
-- ARGV  1 the process
--       2 for how long in ms
-- Returns 0 when the process holds it now, else in how many ms it may be free. Safe to repeat.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return math.max(1, redis.call('PTTL', KEYS[1])) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
