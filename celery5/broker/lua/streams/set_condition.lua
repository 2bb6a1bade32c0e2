-- Quarantine a partition of a group, or end its quarantine.
-- KEYS  1 the partition
-- ARGV  1 condition: quarantined, or '' for none
--       2 why
--       3 incarnation that quarantines what it owns, '' for whoever asks
--       4 its epoch
--       5 channel of the group
-- Returns 1 when it was done, 0 when that incarnation does not own it any more or the group does not have the partition.
local found = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'cursor')
if not found[3] or (ARGV[3] ~= '' and (found[1] ~= ARGV[3] or found[2] ~= ARGV[4])) then return 0 end
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'condition', 'why', 'since')
  redis.call('HSET', KEYS[1], 'deaths', 0)
else
  redis.call('HSET', KEYS[1], 'condition', ARGV[1], 'why', ARGV[2], 'since', now_ms())
end
redis.call('PUBLISH', ARGV[5], 'condition')
return 1
