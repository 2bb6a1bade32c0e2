-- Hold, or go on holding, what one process at a time may have.
-- KEYS  1 who has it
-- ARGV  1 who asks
--       2 for how long in ms
-- Returns 0 when it is the asker's now, else in how many ms it may be free. Safe to repeat.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return math.max(1, redis.call('PTTL', KEYS[1])) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 0
