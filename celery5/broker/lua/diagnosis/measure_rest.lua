-- Say whether anything is left to do at this time, and when the next thing falls due. For tests with virtual time.
-- KEYS  1.. for each queue: the streams of its lanes normal, high, low and handed, what has ended in runs, the outbox of runs, how
--       many jobs wait at limits, scheduled jobs, live runs, when to look at schedules
-- ARGV  1 the time in ms since 1970
-- Returns the position of the first key that has something to do now, from 1 on (0 for none), the first entry of it when it is a lane
-- ('' else), and the earliest time of all that is due later ('' for none).
local PARTS, now, busy, next_due, first = 10, tonumber(ARGV[1]), 0, nil, ''
for n = 1, #KEYS do -- bound: the queues of a test
  local part = (n - 1) % PARTS + 1
  local key, count = KEYS[n], 0
  if part <= 4 or part == 6 then
    count = redis.call('XLEN', key)
  elseif part == 5 then
    count = redis.call('LLEN', key)
  elseif part == 7 then
    count = redis.call('HLEN', key)
  else
    local earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    if earliest and earliest <= now then
      count = 1
    elseif earliest and (not next_due or earliest < next_due) then
      next_due = earliest
    end
  end
  if count > 0 and busy == 0 then
    busy = n
    local entry = part <= 4 and redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if entry then first = entry[2][2] end
  end
end
return {busy, first, next_due and string.format('%.0f', next_due) or ''}
