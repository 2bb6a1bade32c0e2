-- Silence a rule of alerts, or end its silence.
-- KEYS  1 silences
-- ARGV  1 name of the rule
--       2 ms since 1970 until which it is silent; 0 ends it
--       3 the silence, as JSON
--       4 ms that the silence lasts
-- Returns whether something has changed.
if ARGV[2] == '0' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local left = redis.call('PTTL', KEYS[1])
if left < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 1
