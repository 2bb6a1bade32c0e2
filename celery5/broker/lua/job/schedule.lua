-- Keep jobs until their time has come, each of them once.
-- KEYS  1 scheduled jobs by time
--       2 their Commands
--       3 where the queue's jobs are
--       4.. result key of each job, in order
-- ARGV  1 channel that wakes workers
--       2.. for each job: its id, its Command, its time in ms since 1970, or '+' and ms from now
-- Returns how many were new. Workers are woken when one of them is now the first to fall due.
local due, waiting, jobs = KEYS[1], KEYS[2], KEYS[3]
local now = now_ms()
local new, earliest = 0, nil
for n = 4, #KEYS do -- bound: the jobs of this call, 200 at most
  local at = 2 + 3 * (n - 4)
  local id, command, when = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  when = parse_time(when, now)
  if redis.call('HEXISTS', jobs, id) == 0 and redis.call('EXISTS', KEYS[n]) == 0 then
    keep_until(due, waiting, jobs, id, command, 'D', when)
    new = new + 1
    if not earliest or when < earliest then earliest = when end
  end
end
wake_if_first(due, ARGV[1], earliest)
return new
