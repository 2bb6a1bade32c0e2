-- Return which schedules of a queue are due, and when the next one is.
-- KEYS  1 schedules of the queue
--       2 when to look at each of them
--       3 where its jobs are
-- ARGV  1 how many to return at most
--       2 how many of the first ones to pass over
-- Returns the time in ms since 1970, in how many ms the next one is due that is not returned (-1 when none is), and those
-- that are due, each with its state and whether its last job has not ended.
local schedules, times, jobs = KEYS[1], KEYS[2], KEYS[3]
local now = now_ms()
local names = redis.call('ZRANGEBYSCORE', times, '-inf', now, 'LIMIT', ARGV[2], ARGV[1])
local found = {}
for _, name in ipairs(names) do -- bound: ARGV 1
  local state = redis.call('HGET', schedules, name)
  if state then
    local read, schedule = pcall(cjson.decode, state)
    local last = read and type(schedule) == 'table' and schedule.job
    local place = type(last) == 'string' and redis.call('HGET', jobs, last)
    local busy = place and string.sub(place, 1, 1) ~= 'X'
    found[#found + 1] = {state, busy and 1 or 0}
  else
    redis.call('ZREM', times, name)
  end
end
local rest = redis.call('ZRANGE', times, ARGV[2] + #names, ARGV[2] + #names, 'WITHSCORES')
return {now, rest[2] and math.max(0, math.ceil(rest[2] - now)) or -1, found}
