-- Keep jobs until their time has come, each of them once.
-- KEYS  1 scheduled jobs by time
--       2 their envelopes
--       3 where the queue's jobs are
--       4.. result key of each job, in order
-- ARGV  1 channel that wakes workers
--       2.. for each job: its id, its envelope, its time in ms since 1970, or '+' and ms from now
-- Returns how many were new. Workers are woken when one of them is now the first to fall due.
local due, waiting, jobs = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local new, earliest = 0, nil
for n = 4, #KEYS do -- bound: the jobs of this call, 200 at most
  local at = 2 + 3 * (n - 4)
  local id, envelope, when = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if string.sub(when, 1, 1) == '+' then when = now + tonumber(string.sub(when, 2)) else when = tonumber(when) end
  if redis.call('HEXISTS', jobs, id) == 0 and redis.call('EXISTS', KEYS[n]) == 0 then
    redis.call('ZADD', due, when, id)
    redis.call('HSET', waiting, id, envelope)
    redis.call('HSET', jobs, id, 'D')
    new = new + 1
    if not earliest or when < earliest then earliest = when end
  end
end
if earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == earliest then
  redis.call('PUBLISH', ARGV[1], string.format('%.0f', earliest))
end
return new
