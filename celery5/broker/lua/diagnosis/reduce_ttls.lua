-- Let time pass for keys with a time to live: for tests with virtual time, since Redis goes by real time.
-- KEYS  1.. any keys
-- ARGV  1 how many ms have passed
--       2 1: the keys are lists of the starts of rates, in ms; ARGV 1 is subtracted from each
-- Returns how many keys are gone.
local passed, gone = tonumber(ARGV[1]), 0
for n = 1, #KEYS do -- bound: a page of SCAN
  local left = redis.call('PTTL', KEYS[n])
  if left > passed then
    local starts = ARGV[2] == '1' and redis.call('LRANGE', KEYS[n], 0, -1) or {}
    for at, start in ipairs(starts) do -- bound: the number of a rate
      redis.call('LPOP', KEYS[n])
      starts[at] = string.format('%.0f', start - passed)
    end
    for _, start in ipairs(starts) do redis.call('RPUSH', KEYS[n], start) end -- bound: as above
    redis.call('PEXPIRE', KEYS[n], string.format('%.0f', left - passed))
  elseif left >= 0 then
    gone = gone + redis.call('DEL', KEYS[n])
  end
end
return gone
