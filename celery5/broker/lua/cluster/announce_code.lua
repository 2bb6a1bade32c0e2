-- Announce the version of a worker's code on a queue, for as long as a lease.
-- KEYS  1 where the queue's jobs are; what is known of code and of foreign jobs is named after it (lib/foreign.lua)
-- ARGV  1 the version
--       2 lease in ms
--       3.. the tasks of the version, each with the digest of its signature: only when an earlier call has asked for them
-- Returns 1, or 0 when the tasks of the version are not known: the call is to be repeated with them; and of how many tasks
-- there are foreign jobs.
local jobs, version, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local versions, tasks = jobs .. ':code', jobs .. ':code:' .. version
local now = now_ms()
for n = 3, #ARGV, 1000 do -- bound: the tasks of an application
  redis.call('HSET', tasks, unpack(ARGV, n, math.min(n + 999, #ARGV)))
end
local known = redis.call('PEXPIRE', tasks, lease)
redis.call('ZREMRANGEBYSCORE', versions, '-inf', now)
if known == 1 then
  redis.call('ZADD', versions, now + lease, version)
  keep_for(versions, lease)
end
return {known, redis.call('HLEN', jobs .. ':foreign')}
