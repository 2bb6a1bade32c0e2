-- Hand a partition over to a member of the group whose class of records is another one than its owner's: the owner cannot
-- read a record.
-- KEYS  1 the partition
--       2 plan of the group
--       3 members of the group
--       4 the incarnation of each
--       5 the digest of the class of records of each
-- ARGV  1 this member
--       2 its incarnation
--       3 its epoch
--       4 number of the partition
--       5 id of the record
--       6 the digest of its own class
--       7 for how many ms it waits while no member has another class
--       8 channel of the group
-- Returns in how many ms the owner is to look again, if it still is the owner; 0 when there is nothing to wait for any more.
-- The partition notes which classes could not read the record, and since when no member has another one.
local member, incarnation, id, digest = ARGV[1], ARGV[2], ARGV[5], ARGV[6]
local now, again = now_ms(), 500
local found = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'unreadable')
if found[1] ~= incarnation or found[2] ~= ARGV[3] then return again end
local noted, since, refused = string.match(found[3] or '', '^(%S+) (%d+) (%S+)$')
if noted ~= id then since, refused = '0', digest end
if not string.find(',' .. refused .. ',', ',' .. digest .. ',', 1, true) then refused = refused .. ',' .. digest end
local others = {}
for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. now, '+inf')) do -- bound: the members of the group
  local class = other ~= member and not is_leaving(other) and redis.call('HGET', KEYS[5], other)
  if class and not string.find(',' .. refused .. ',', ',' .. class .. ',', 1, true)
    and redis.call('HEXISTS', KEYS[4], other) == 1 then
    others[#others + 1] = other
  end
end
if others[1] then
  table.sort(others)
  redis.call('HSET', KEYS[1], 'unreadable', id .. ' 0 ' .. refused)
  redis.call('HSET', KEYS[2], ARGV[4], others[ARGV[4] % #others + 1])
  redis.call('PUBLISH', ARGV[8], 'plan')
  return again
end
if since == '0' then since = string.format('%.0f', now) end
redis.call('HSET', KEYS[1], 'unreadable', id .. ' ' .. since .. ' ' .. refused)
return math.max(0, math.min(again, since + ARGV[7] - now))
