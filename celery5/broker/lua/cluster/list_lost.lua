-- List the processes of some kind that were lost in the last hour: their lease is over, and they have not left.
-- KEYS  1 the processes of that kind, by the end of their lease
-- Returns the name of each of the last twenty, and for how many ms its lease is over.
local now, found = now_ms(), {}
local lost = redis.call('ZRANGE', KEYS[1], string.format('%.0f', now), '(' .. string.format('%.0f', now - 3600000), 'BYSCORE', 'REV',
  'LIMIT', 0, 20, 'WITHSCORES')
for n = 1, #lost, 2 do found[#found + 1] = {lost[n], math.floor(now - lost[n + 1])} end -- bound: twenty
return found
