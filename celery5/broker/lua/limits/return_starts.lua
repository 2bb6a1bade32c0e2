-- Return starts of the rate of a kind of task that no job was begun with.
-- KEYS  1 the last starts, in ms, the oldest first
-- ARGV  1.. for each group of starts: the time under which it is noted, and how many of it are returned
-- Returns how many were returned: none that are not noted any more.
local returned = 0
for n = 1, #ARGV, 2 do -- bound: the groups of this call
  returned = returned + redis.call('LREM', KEYS[1], -ARGV[n + 1], ARGV[n])
end
return returned
