-- Impose the limits of a Scheduler's rules for some time, unless it is another Scheduler's turn.
-- KEYS  1 the Scheduler whose turn it is
--       2 what is imposed
-- ARGV  1 this Scheduler's name
--       2 what it imposes, as JSON; '' for nothing
--       3 ms for which that holds
--       4 channel that notifies workers of changes
-- Returns whether it was stored.
local whose = redis.call('GET', KEYS[1])
if whose and whose ~= ARGV[1] then return 0 end
local before = redis.call('GET', KEYS[2]) or ''
if ARGV[2] == '' then
  redis.call('DEL', KEYS[2])
else
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
if before ~= ARGV[2] then redis.call('PUBLISH', ARGV[4], '') end
return 1
