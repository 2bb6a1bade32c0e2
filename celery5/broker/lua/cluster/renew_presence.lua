-- Renew the presence of a process of some kind, and return the live ones. Losses of its name are repaired then.
-- KEYS  1 the processes of that kind, by the end of their lease
--       2 those of them that were lost and whose loss is repaired, by when
-- ARGV  1 this process' name
--       2 lease in ms; 0 to leave
-- Returns the names of the live processes, sorted, with this one unless it leaves. Those whose lease is over stay for an hour,
-- so that somebody can say that they were lost; one that leaves does not.
local living, repaired, name, lease = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', living, '-inf', string.format('%.0f', now - 3600000))
if lease > 0 then
  redis.call('ZADD', living, now + lease, name)
  local last = redis.call('ZRANGE', living, -1, -1, 'WITHSCORES')
  redis.call('PEXPIREAT', living, string.format('%.0f', last[2] + 3600000))
else
  redis.call('ZREM', living, name)
end
-- That a loss is repaired is noted, so it stays so when this process has left. A loss is known when its lease has lapsed.
-- A set of another type ends no presence.
local is_readable = type(redis.pcall('ZREM', repaired, name)) == 'number'
local lost = redis.call('ZRANGE', living, string.format('%.0f', now), '(' .. string.format('%.0f', now - 3600000), 'BYSCORE', 'REV',
  'LIMIT', 0, 20)
for _, other in ipairs(lost) do -- bound: twenty, which is how many are listed
  if is_readable and other ~= name and is_successor(name, other) then
    redis.call('ZADD', repaired, 'NX', now, other)
    redis.call('ZREMRANGEBYSCORE', repaired, '-inf', string.format('%.0f', now - 7200000))
    redis.call('PEXPIRE', repaired, 3600000)
  end
end
local names = redis.call('ZRANGEBYSCORE', living, '(' .. string.format('%.0f', now), '+inf')
table.sort(names)
return names
