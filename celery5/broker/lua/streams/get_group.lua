-- Return the state of one group of a stream.
-- KEYS  1 map of the stream
--       2 members of the group
--       3 the incarnation of each
--       4 prefix of its partitions
--       5 prefix of the logs
--       6 its keyed state
--       7 its parked keys
-- ARGV  1 first partition to look at
--       2 how many at most
--       3 what the state with the number of open windows of a partition begins with
--       4 what that with the number of its late records begins with
-- Returns {number of partitions in all, ms since 1970, members, partitions, how many keys are parked, how many records
-- those have}: for each partition its number, last id, cursor, the first
-- unread id that is still there ('' for none), how many records the log has, owner, epoch, deaths, condition, why, since when
-- in ms since 1970 (0 for no condition), the numbers of the first and the last record that were archived ('' for none), how
-- many windows are open, and how many records were late.
local map, members, incarnations, partitions, logs, state, parked = unpack(KEYS)
local _, total = count_partitions(map)
local now = now_ms()
local present = members_at(members, incarnations, now)
local found = {}
local has_state = redis.call('EXISTS', state) == 1
local has_archived = redis.call('HEXISTS', map, 'archived') == 1
for p = tonumber(ARGV[1]), math.min(total, ARGV[1] + ARGV[2]) - 1 do -- bound: the partitions of one call
  local one = redis.call('HMGET', partitions .. p, 'cursor', 'owner', 'epoch', 'deaths', 'condition', 'why', 'since')
  local cursor = one[1] or '0-0'
  local tail = last_id(logs .. p)
  local unread = ''
  if is_before(cursor, tail) then
    local entry = redis.call('XRANGE', logs .. p, '(' .. cursor, '+', 'COUNT', 1)[1]
    unread = entry and entry[1] or ''
  end
  local windows = has_state and redis.call('HMGET', state, ARGV[3] .. p, ARGV[4] .. p) or {}
  found[#found + 1] = {p, tail, cursor, unread, redis.call('XLEN', logs .. p), one[2] or '', tonumber(one[3]) or 0, tonumber(one[4]) or 0, one[5] or '', one[6] or '', tonumber(one[7]) or 0, has_archived and redis.call('HGET', map, 'archived:' .. p) or '', tonumber(windows[1] or 0) or 0, tonumber(windows[2] or 0) or 0}
end
local records, parked_keys = redis.call('HGET', parked, 'records'), 0
for _, field in ipairs(records and redis.call('HKEYS', parked) or {}) do -- bound: the parked keys of a group, 1,000 at most
  if string.sub(field, 1, 4) == 'key:' then parked_keys = parked_keys + 1 end
end
return {total, now, present, found, parked_keys, tonumber(records or 0) or 0}
