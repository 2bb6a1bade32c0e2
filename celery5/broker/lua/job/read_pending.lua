-- Return the jobs that a worker has taken from a lane and has not settled. XREADGROUP would count this as a new delivery, and
-- change the time when the worker took each job.
-- KEYS  1 stream of the lane
-- ARGV  1 consumer group
--       2 the worker
--       3 the entry after which to begin, or 0
--       4 how many jobs at most
-- Returns them as XREADGROUP does: with no fields when an entry was deleted meanwhile.
local entries = {}
for n, pending in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1], '(' .. ARGV[3], '+', ARGV[4], ARGV[2])) do -- bound: ARGV 4
  local entry = redis.call('XRANGE', KEYS[1], pending[1], pending[1])[1]
  entries[n] = {pending[1], entry and entry[2] or false}
end
return {{KEYS[1], entries}}
