-- Ask the process that performs a bulk action to stop it; end the action when there is no such process.
-- KEYS  1 the action
--       2 its lease
-- ARGV  1 who asks
-- Returns 0 it is not known or has ended, 1 it is asked to stop, 2 it was interrupted and is stopped now. Safe to repeat.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'waiting' and state ~= 'running' then return 0 end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('HSET', KEYS[1], 'stop', ARGV[1])
  return 1
end
redis.call('HSET', KEYS[1], 'stop', ARGV[1], 'state', 'stopped', 'ended', string.format('%.0f', now_ms()))
return 2
