-- Take, keep or give up the turn to roll reports up, which one process of the application has at a time.
-- KEYS  1 whose turn it is
--       2 where the rollup is
-- ARGV  1 name of this process
--       2 ms that the turn lasts; 0 gives it up
-- Returns whether it is this one's turn, the id of the last report that was rolled up ('' for none), and the time in ms.
local now = now_ms()
local whose = redis.call('GET', KEYS[1])
if whose and whose ~= ARGV[1] then return {0, '', now} end
if tonumber(ARGV[2]) == 0 then
  if whose then redis.call('DEL', KEYS[1]) end
  return {0, '', now}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, redis.call('HGET', KEYS[2], 'cursor') or '', now}
