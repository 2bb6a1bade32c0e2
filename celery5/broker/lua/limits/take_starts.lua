-- Take starts of the rate of a kind of task: each lets one job of that kind begin, on any queue.
-- KEYS  1 the last starts, in ms, the oldest first
-- ARGV  1 how many are wanted
--       2 how many the rate allows in its period
--       3 the period in ms
-- Returns how many were taken, the time in ms since 1970 under which they are noted, and in how many ms the next one can
-- be taken.
local starts, want, most, window = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
redis.call('LTRIM', starts, -most, -1)
local taken = math.min(want, most - redis.call('LLEN', starts))
-- The others take the places of the oldest starts, as far as these are not in the period any more.
for _, start in ipairs(taken < want and redis.call('LRANGE', starts, 0, want - taken - 1) or {}) do -- bound: ARGV 1
  if start + window > now then break end
  taken = taken + 1
end
local wait = 0
for _ = 1, taken do redis.call('RPUSH', starts, now) end -- bound: ARGV 1
if taken > 0 then
  redis.call('LTRIM', starts, -most, -1)
  redis.call('PEXPIRE', starts, window)
end
if taken < want then wait = math.max(0, redis.call('LINDEX', starts, -most) + window - now) end
return {taken, now, wait}
