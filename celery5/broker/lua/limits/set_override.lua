-- Impose something on a task, or take it back, and tell all workers.
-- KEYS  1 what is imposed, by task
-- ARGV  1 channel that tells of changes
--       2 the task
--       3 what, as JSON; '' takes back what there is
--       4 what is taken back or replaced: only this; '' for anything, '-' for nothing
-- Returns 1 when something has changed, else 0.
local before = redis.call('HGET', KEYS[1], ARGV[2]) or ''
local only = ARGV[4] == '-' and '' or ARGV[4]
if before == ARGV[3] or (ARGV[4] ~= '' and before ~= only) then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('PUBLISH', ARGV[1], ARGV[2])
return 1
