-- Remember where the scaling of an application is, unless it is another Scheduler's turn.
-- KEYS  1 whose turn it is
--       2 where the scaling is
-- ARGV  1 this Scheduler's name
--       2 where it is now
--       3 ms for which that is remembered
-- Returns whether it was remembered.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
