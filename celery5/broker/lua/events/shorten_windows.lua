-- Shorten the deduplication windows of jobs whose event or document cannot come again.
-- KEYS  1.. the window of each job
-- ARGV  1 ms for which the windows last from now on
-- Returns how many windows there were.
local known = 0
for _, window in ipairs(KEYS) do -- bound: the jobs of this call
  if redis.call('PTTL', window) > tonumber(ARGV[1]) then known = known + redis.call('PEXPIRE', window, ARGV[1]) end
end
return known
