-- Acquire or renew a lease that one process holds at a time.
-- KEYS  1 the lease
--       2.. one that may be missing: the processes that ask for it, by the time in ms until which that counts
-- ARGV  1 the process
--       2 for how long in ms: the lease, and that it has asked
-- Returns in how many ms the lease may be free, 0 when the process holds it now; and how many others have asked for it
-- lately, 0 without KEYS[2]. Safe to repeat.
local others = 0
if KEYS[2] then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  others = redis.call('ZCARD', KEYS[2]) - 1
end
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {math.max(1, redis.call('PTTL', KEYS[1])), others} end
redis.call('PEXPIRE', KEYS[1], ARGV[2]) -- which Redis does when its memory is full; so it does what follows, too
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {0, others}
