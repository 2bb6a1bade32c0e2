-- Store the state of the scaling of an application, unless it is another Scheduler's turn.
-- KEYS  1 the Scheduler whose turn it is
--       2 the state of the scaling
-- ARGV  1 this Scheduler's name
--       2 the new state
--       3 its time to live in ms
-- Returns whether it was stored.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
