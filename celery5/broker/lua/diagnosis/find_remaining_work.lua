-- Say whether anything is left to do at this time, and when the next thing falls due. For tests with virtual time.
-- KEYS  1.. for each queue: the streams of its lanes normal, high, low and handed, what has ended in runs, the outbox of runs, how
--       many jobs wait at limits, scheduled jobs, when to look at schedules, live runs, prefix of the keys of runs
-- ARGV  1 the time in ms since 1970
-- Returns the position of the first key that has something to do now, from 1 on (0 for none), the first entry of it when it is a lane
-- ('' else), and the earliest time of all that is due later ('' for none).
local PARTS, now, busy, next_due, first = 11, tonumber(ARGV[1]), 0, nil, ''
-- Return the earliest time at which a run has something to do. One that is being undone is looked at each minute, and only waits for its
-- jobs: time does not stop for that.
local function next_run(runs, prefix)
  local listed = redis.call('ZRANGE', runs, 0, 999, 'WITHSCORES')
  for n = 1, #listed, 2 do -- bound: 1000
    local at, state = tonumber(listed[n + 1]), redis.call('HGET', prefix .. listed[n], 'state')
    if at <= now or not state or string.sub(state, 1, 7) ~= 'undoing' then return at end
  end
end
for n = 1, #KEYS do -- bound: the queues of a test
  local part = (n - 1) % PARTS + 1
  local key, count = KEYS[n], 0
  if part <= 4 or part == 6 then
    count = redis.call('XLEN', key)
  elseif part == 5 then
    count = redis.call('LLEN', key)
  elseif part == 7 then
    count = redis.call('HLEN', key)
  elseif part < 11 then
    local earliest
    if part == 10 then earliest = next_run(key, KEYS[n + 1]) else earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) end
    if earliest and earliest <= now then
      count = 1
    elseif earliest and (not next_due or earliest < next_due) then
      next_due = earliest
    end
  end
  -- Jobs at a limit may wait for time to pass: they are reported only if nothing else remains.
  local is_limited = busy > 0 and (busy - 1) % PARTS + 1 == 7 and part ~= 7
  if count > 0 and (busy == 0 or is_limited) then
    busy = n
    local entry = part <= 4 and redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if entry then first = entry[2][2] end
  end
end
return {busy, first, next_due and string.format('%.0f', next_due) or ''}
