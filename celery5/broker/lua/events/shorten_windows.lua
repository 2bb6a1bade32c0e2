-- Let it be forgotten sooner that jobs were sent: what they follow from cannot come again.
-- KEYS  1.. the window of each job
-- ARGV  1 how long it is still remembered, in ms
-- Returns how many were remembered.
local known = 0
for _, window in ipairs(KEYS) do -- bound: the jobs of this call
  if redis.call('PTTL', window) > tonumber(ARGV[1]) then known = known + redis.call('PEXPIRE', window, ARGV[1]) end
end
return known
