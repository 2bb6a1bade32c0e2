-- Take a subscription back, or allow it again. What was taken back stays so while workers declare it all the same, and is
-- forgotten when none has for as long as a declaration counts. Safe to repeat.
-- KEYS  1 registry of subscriptions
--       2 until when each of them counts, in ms
-- ARGV  1 its name
--       2 1 to take it back, 0 to allow it again
--       3 how long a declaration counts, in ms
-- Returns 1 when that changed something, else 0.
local registry, subscribed, name, span = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[3])
local time = redis.call('TIME')
local before = redis.call('HGET', registry, name)
if ARGV[2] == '1' then
  redis.call('HSET', registry, name, '')
  redis.call('ZADD', subscribed, time[1] * 1000 + span, name)
  for n = 1, 2 do -- bound: two keys
    if redis.call('PTTL', KEYS[n]) < span then redis.call('PEXPIRE', KEYS[n], span) end
  end
  if before == '' then return 0 end
else
  if before ~= '' then return 0 end
  redis.call('HDEL', registry, name)
  redis.call('ZREM', subscribed, name)
  if redis.call('HLEN', registry) == 1 then redis.call('HDEL', registry, '') end
end
if redis.call('EXISTS', registry) == 1 then
  redis.call('HSET', registry, '', time[1] .. string.format('%06d', time[2]))
end
return before and 1 or 0
