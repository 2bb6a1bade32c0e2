-- Renew the lease of a bulk action, and save what has changed.
-- KEYS  1 the action
--       2 its lease
-- ARGV  1 name of the process that performs it
--       2 ms that the lease lasts; 0 gives it up
--       3 ms for which the action is kept
--       4 1 when it has ended, 0 when not
--       5.. names and values of fields
-- Returns 0 when it is not this process' action, or has ended; 2 when somebody has asked to stop it; else 1.
-- Safe to repeat, but for an action that has ended.
local holder = redis.call('GET', KEYS[2])
local state = redis.call('HGET', KEYS[1], 'state')
if not state or (holder and holder ~= ARGV[1]) or (state ~= 'waiting' and state ~= 'running') then return 0 end
local now = string.format('%.0f', now_ms())
if ARGV[5] then redis.call('HSET', KEYS[1], 'changed', now, unpack(ARGV, 5)) end
if ARGV[4] == '1' then redis.call('HSET', KEYS[1], 'ended', now) end
if tonumber(ARGV[2]) == 0 then
  redis.call('DEL', KEYS[2])
elseif holder then
  redis.call('PEXPIRE', KEYS[2], ARGV[2]) -- which Redis does with full memory, too
else
  redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if redis.call('HEXISTS', KEYS[1], 'stop') == 1 then return 2 end
return 1
