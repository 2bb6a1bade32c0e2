-- Return what a worker was given on a lane and has not settled. XREADGROUP would count as a new delivery: the time since which
-- the worker has a job would be that of the last look.
-- KEYS  1 stream of the lane
-- ARGV  1 consumer group
--       2 the worker
--       3 the entry after which to begin, or 0
--       4 how many jobs at most
-- Returns them as XREADGROUP does: with no fields when an entry was deleted meanwhile.
local entries = {}
for n, one in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '(' .. ARGV[3], '+', ARGV[4], ARGV[2])) do -- bound: ARGV 4
  local entry = redis.call('XRANGE', KEYS[1], one[1], one[1])[1]
  entries[n] = {one[1], entry and entry[2] or false}
end
return {{KEYS[1], entries}}
