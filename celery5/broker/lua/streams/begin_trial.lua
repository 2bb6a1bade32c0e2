-- Note that the first unread record of a partition, at which an owner has died, is processed now and no other suspect is.
-- KEYS  1 the partition
-- ARGV  1 incarnation of the owner
--       2 its epoch
-- Returns 1 when it was noted, 0 when that incarnation does not own it any more.
local found = redis.call('HMGET', KEYS[1], 'owner', 'epoch')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'trial', ARGV[2])
return 1
