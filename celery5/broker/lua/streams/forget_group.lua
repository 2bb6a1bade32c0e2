-- Forget a group, in portions of partitions: the first one ends that it holds back trimming.
-- KEYS  1 map of the stream
--       2 its groups
--       3 members of the group
--       4 the incarnation of each
--       5 plan of the group
--       6 prefix of its partitions
--       7 prefix of its outboxes
--       8 its keyed state
--       9 its dead records
--       10 its parked keys
--       11 prefix of the logs of those
--       12 the digest of the class of records of each member
-- ARGV  1 group
--       2 first partition of this portion
--       3 how many partitions at most
--       4 1 to forget outputs that are not delivered, and dead records
-- Returns {'ok', first partition of the next portion, 0 when all is done}; {'unknown'} for no such group; {'live', how many
-- members run}; {'kept', how many outputs are not delivered, how many dead records and how many parked ones there are} when
-- it was refused for those.
local map, groups, members, incarnations, plan, partitions, outboxes, state, dead, parked, parked_logs = unpack(KEYS, 1, 11)
local group, first, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local _, total = count_partitions(map)
local is_known = redis.call('HEXISTS', groups, group) == 1
if first == 0 then
  -- The plan of a group that was forgotten in part is still there.
  if not is_known and redis.call('EXISTS', plan, members, state, dead, parked) == 0 then return {'unknown'} end
  local live = count_living(members, incarnations, now_ms())
  if live > 0 then return {'live', live} end
  if ARGV[4] ~= '1' then
    local undelivered, given_up = 0, redis.call('XLEN', dead)
    local waiting = tonumber(redis.call('HGET', parked, 'records') or 0)
    for p = 0, total - 1 do undelivered = undelivered + redis.call('XLEN', outboxes .. p) end -- bound: the partitions
    if undelivered + given_up + waiting > 0 then return {'kept', undelivered, given_up, waiting} end
  end
  redis.call('HDEL', groups, group)
elseif is_known then
  return {'live', math.max(1, count_living(members, incarnations, now_ms()))} -- it has begun again
end
local last = math.min(total, first + most) - 1
for p = first, last do redis.call('UNLINK', partitions .. p, outboxes .. p) end -- bound: one portion
if last + 1 < total then return {'ok', last + 1} end
drop_parked(parked, parked_logs)
redis.call('UNLINK', members, incarnations, plan, state, dead, KEYS[12])
return {'ok', 0}
