-- List the processes of some kind that were lost in the last hour: their lease is over, and they have not left.
-- KEYS  1 the processes of that kind, by the end of their lease
--       2 those of them whose loss is repaired, by when
-- Returns the name of each of the last twenty, for how many ms its lease is over, and for how many its loss is repaired: -1 if it is not.
local now, found = now_ms(), {}
local lost = redis.call('ZRANGE', KEYS[1], string.format('%.0f', now), '(' .. string.format('%.0f', now - 3600000), 'BYSCORE', 'REV',
  'LIMIT', 0, 20, 'WITHSCORES')
for n = 1, #lost, 2 do -- bound: twenty
  local since = redis.pcall('ZSCORE', KEYS[2], lost[n])
  found[#found + 1] = {lost[n], math.floor(now - lost[n + 1]), type(since) == 'string' and math.max(0, math.floor(now - since)) or -1}
end
return found
