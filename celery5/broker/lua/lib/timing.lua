-- Timing: what the scripts that keep jobs until their time share: they begin with it.
-- Return a time in ms since 1970, given as that or as '+' and ms from `now`.
local function parse_time(when, now)
  if string.sub(when, 1, 1) == '+' then return now + tonumber(string.sub(when, 2)) end
  return tonumber(when)
end
-- Keep a job until its time. `place` is its place: the letter and what follows it.
local function keep_until(due, waiting, jobs, id, message, place, when)
  redis.call('ZADD', due, when, id)
  redis.call('HSET', waiting, id, message)
  redis.call('HSET', jobs, id, place)
end
-- Wake the workers when the earliest of the jobs that were just kept is now the first of all to fall due.
local function wake_if_first(due, channel, earliest)
  if earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == earliest then
    redis.call('PUBLISH', channel, string.format('%.0f', earliest))
  end
end
