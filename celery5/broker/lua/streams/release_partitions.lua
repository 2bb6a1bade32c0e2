-- Give partitions back, and with ARGV[4] leave the group.
-- KEYS  1 map of the stream
--       2 members of the group
--       3 the incarnation of each
--       4 prefix of its partitions
--       5 prefix of the logs
-- ARGV  1 member
--       2 its incarnation
--       3 channel of the group
--       4 '' to stay a member; else for how many ms its share is kept for its return, 0 for not at all
--       5 1 when the incarnation has died: what it may have died of counts a death
--       6.. the partitions; all that it owns when it leaves
-- Returns how many partitions were given back.
local map, members, incarnations, partitions, logs = unpack(KEYS)
local member, incarnation, channel, absence = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local given = 0
local function give(p)
  local key = partitions .. p
  local found = redis.call('HMGET', key, 'owner', 'cursor', 'epoch', 'deaths', 'trial')
  if found[1] == incarnation then
    redis.call('HSET', key, 'owner', '')
    if ARGV[5] == '1' and is_suspect(tonumber(found[4]) or 0, found[3], found[5], found[2] or '0-0', logs .. p) then
      redis.call('HINCRBY', key, 'deaths', 1)
      redis.call('HSET', key, 'suspect', last_id(logs .. p))
    end
    given = given + 1
  end
end
if absence == '' then
  for n = 6, #ARGV do give(ARGV[n]) end -- bound: the partitions of one call
else
  local _, total = count_partitions(map)
  for p = 0, total - 1 do give(p) end -- bound: the partitions
  if redis.call('HGET', incarnations, member) == incarnation then
    redis.call('HDEL', incarnations, member)
    if absence == '0' then
      redis.call('ZREM', members, member)
    else
      redis.call('ZADD', members, now_ms() + absence, member)
    end
  end
end
redis.call('PUBLISH', channel, 'yield')
return given
