-- Take, keep or give up the turn to scale an application, of which one Scheduler has it at a time.
-- KEYS  1 whose turn it is
--       2 where the scaling is
-- ARGV  1 this Scheduler's name
--       2 ms that the turn lasts; 0 gives it up
-- Returns whether it is this one's turn, where the scaling is ('' when it has not begun), and the time in ms.
local now = now_ms()
local whose = redis.call('GET', KEYS[1])
if whose and whose ~= ARGV[1] then return {0, '', now} end
if tonumber(ARGV[2]) == 0 then
  if whose then redis.call('DEL', KEYS[1]) end
  return {0, '', now}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, redis.call('GET', KEYS[2]) or '', now}
