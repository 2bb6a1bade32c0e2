-- Renew the presence of a process of some kind, and return the live ones.
-- KEYS  1 the processes of that kind, by the end of their lease
-- ARGV  1 this process' name
--       2 lease in ms; 0 to leave
-- Returns the names of the live processes, sorted, with this one unless it leaves.
local living, name, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', living, '-inf', now)
if lease > 0 then
  redis.call('ZADD', living, now + lease, name)
  local last = redis.call('ZRANGE', living, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', living, string.format('%.0f', last[2]))
else
  redis.call('ZREM', living, name)
end
local names = redis.call('ZRANGE', living, 0, -1)
table.sort(names)
return names
