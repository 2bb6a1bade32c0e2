-- Let time pass for keys with a time to live: for tests with virtual time, since Redis goes by real time.
-- KEYS  1.. any keys
-- ARGV  1 how many ms have passed
-- Returns how many keys are gone.
local passed, gone = tonumber(ARGV[1]), 0
for n = 1, #KEYS do -- bound: a page of SCAN
  local left = redis.call('PTTL', KEYS[n])
  if left > passed then
    redis.call('PEXPIRE', KEYS[n], string.format('%.0f', left - passed))
  elseif left >= 0 then
    gone = gone + redis.call('DEL', KEYS[n])
  end
end
return gone
