-- Set or remove an override of a task's limits, and notify all workers.
-- KEYS  1 overrides, by task
-- ARGV  1 channel that notifies workers of changes
--       2 the task
--       3 the override, as JSON; '' removes the one that there is
--       4 what may be removed or replaced: only this; '' for anything, '-' for nothing
-- Returns 1 when something has changed, else 0.
local before = redis.call('HGET', KEYS[1], ARGV[2]) or ''
local only = ARGV[4] == '-' and '' or ARGV[4]
if before == ARGV[3] or (ARGV[4] ~= '' and before ~= only) then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 1
