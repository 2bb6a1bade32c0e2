-- Note that a node of a run waits for an event with certain values.
-- KEYS  1 who waits for such an event
-- ARGV  1 home, run and node
--       2 ttl in ms. It never shortens that of the key: others wait there, too
-- Returns 1 when it is new, else 0. Safe to repeat.
local is_new = redis.call('SADD', KEYS[1], ARGV[1])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return is_new
