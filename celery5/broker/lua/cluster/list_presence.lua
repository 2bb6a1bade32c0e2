-- List the live processes of some kind.
-- KEYS  1 the processes of that kind, by the end of their lease
-- Returns their names, sorted.
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now_ms()), '+inf')
table.sort(names)
return names
