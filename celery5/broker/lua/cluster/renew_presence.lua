-- Renew the presence of a process of some kind, and return the live ones.
-- KEYS  1 the processes of that kind, by the end of their lease
-- ARGV  1 this process' name
--       2 lease in ms; 0 to leave
-- Returns the names of the live processes, sorted, with this one unless it leaves. Those whose lease is over stay for an hour,
-- so that somebody can say that they were lost; one that leaves does not.
local living, name, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', living, '-inf', string.format('%.0f', now - 3600000))
if lease > 0 then
  redis.call('ZADD', living, now + lease, name)
  local last = redis.call('ZRANGE', living, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', living, string.format('%.0f', last[2] + 3600000))
else
  redis.call('ZREM', living, name)
end
local names = redis.call('ZRANGEBYSCORE', living, '(' .. string.format('%.0f', now), '+inf')
table.sort(names)
return names
