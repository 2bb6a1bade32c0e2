-- Move the cursors of a group, of one partition or of all.
-- KEYS  1 map of the stream
--       2 its groups
--       3 members of the group
--       4 the incarnation of each
--       5 prefix of its partitions
--       6 prefix of the logs
--       7 keyed state of the group
--       8 its parked keys
--       9 prefix of the logs of those
-- ARGV  1 group
--       2 where to: $ for the end, else the first id that is read next
--       3 the partition, '' for all
--       4 1 to do it while members live: their owners are fenced, and begin again at the new place
--       5 channel of the group
--       6 1 to begin again: quarantines end, and parked records are forgotten: they are read again
--       7 1 to forget the keyed state
-- Returns how many members live when it was refused for that, else -1 for an unknown group, else {cursor, ...} by
-- partition ('' for those that were left alone).
local map, groups, members, incarnations, partitions, logs, state, parked, parked_logs = unpack(KEYS)
local group, first, only = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HEXISTS', groups, group) == 0 then return -1 end
local live = count_living(members, incarnations, now_ms())
if live > 0 and ARGV[4] ~= '1' then return live end
local _, total = count_partitions(map)
local cursors = {}
for p = 0, total - 1 do -- bound: the partitions
  if only == '' or tonumber(only) == p then
    local key = partitions .. p
    local cursor = cursor_before(logs .. p, first)
    redis.call('HSET', key, 'cursor', cursor, 'deaths', 0, 'ahead', '', 'owner', '')
    redis.call('HINCRBY', key, 'epoch', 1)
    if ARGV[6] == '1' then redis.call('HDEL', key, 'condition', 'why', 'since') end
    cursors[#cursors + 1] = cursor
  else
    cursors[#cursors + 1] = ''
  end
end
if ARGV[6] == '1' then drop_parked(parked, parked_logs) end
if ARGV[7] == '1' then redis.call('UNLINK', state) end
redis.call('PUBLISH', ARGV[5], 'seek')
return cursors
