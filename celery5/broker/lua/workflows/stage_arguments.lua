-- Put a portion of the arguments of its calls beside a run that is not live yet.
-- KEYS  1 the run
--       2 the arguments
--       3 idle runs
-- ARGV  1 ttl in ms: what is not started in this time is gone
--       2 the id of the run
--       3.. numbers of arguments, each before its text
-- Returns how many arguments there are now; -1 when the run is live already. Safe to repeat.
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return -1 end
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return redis.call('HLEN', KEYS[2])
