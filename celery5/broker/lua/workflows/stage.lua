-- Put a portion of the items of a map beside a run that is not live yet.
-- KEYS  1 the run
--       2 the items
--       3 idle runs
-- ARGV  1 how many items come before this portion
--       2 ttl in ms: what is not started in this time is gone
--       3 the id of the run
--       4.. the items
-- Returns how many items there are now; -1 when the run is live already; -2 when portions are missing. Safe to repeat.
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HEXISTS', KEYS[3], ARGV[3]) == 1 then return -1 end
local before, length = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
if length < before then return -2 end
if length == before and #ARGV > 3 then length = redis.call('RPUSH', KEYS[2], unpack(ARGV, 4)) end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return length
