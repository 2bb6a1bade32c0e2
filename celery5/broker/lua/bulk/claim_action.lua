-- Claim a bulk action for a process that performs it: a new one, or one whose process has died.
-- KEYS  1 the action
--       2 its lease
--       3 the list of all actions
-- ARGV  1 name of the process
--       2 ms that the lease lasts
--       3 ms for which the action is kept
--       4 its id
--       5 actions that the list keeps
--       6.. names and values of the fields of a new action; none to resume one
-- Returns 1 claimed, 0 another process has it, -1 it is not known, -2 it has ended. Safe to repeat by the same process.
local now = string.format('%.0f', now_ms())
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return 0 end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  if not ARGV[6] then return -1 end
  redis.call('HSET', KEYS[1], 'created', now, unpack(ARGV, 6))
  redis.call('ZADD', KEYS[3], now, ARGV[4])
elseif state ~= 'waiting' and state ~= 'running' then
  return -2
end
redis.call('HSET', KEYS[1], 'state', 'waiting')
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3])
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - ARGV[5])
return 1
