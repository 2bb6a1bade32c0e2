-- Keep a portion of a plan.
-- KEYS  1 the plan
-- ARGV  1 ttl in ms, unless it has a longer one
--       2.. the number of a node, or `head`, and its content
-- Returns how many fields the plan has. Safe to repeat.
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return redis.call('HLEN', KEYS[1])
