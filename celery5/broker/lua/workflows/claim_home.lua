-- Claim the id of a run for a home, unless another one has it. SET with NX and GET is one command for this, from Redis 7 on.
-- KEYS  1 the home of the run
-- ARGV  1 the home
--       2 ttl in ms
-- Returns the home that has the id. Safe to repeat.
local home = redis.call('GET', KEYS[1])
if home then return home end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
