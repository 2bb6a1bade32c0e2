-- Change the number of partitions. What is behind the border that this leaves in each log is read only when all earlier
-- records of the same keys are.
-- KEYS  1 map of the stream
--       2 its groups
--       3 prefix of the logs
--       4 prefix of the keyed state of groups
-- ARGV  1 number of partitions
--       2 prefix of the channels of its groups
--       3 1 to do it though windows are open: these stay in their partitions, without what comes later
--       4 what the state with the number of open windows of a partition begins with
-- Returns {'ok', earlier number, version}, or {'unknown'} for no such stream, {'many', most borders} when too many
-- changes are not read past by all groups, {'windows', group, partition} when that has open windows.
local map, groups, logs, states = unpack(KEYS)
local count, total, version, text = count_partitions(map)
if count == 0 then return {'unknown'} end
local new = tonumber(ARGV[1])
if new == count then return {'ok', count, version} end
-- A border is forgotten when all that was in front of it has been trimmed: then no group can read it out of order.
local borders = {}
for _, border in ipairs(text and cjson.decode(text) or {}) do -- bound: the borders
  local is_needed = false
  for p = 0, border.old - 1 do -- bound: the partitions
    local entry = redis.call('XRANGE', logs .. p, '-', '+', 'COUNT', 1)[1]
    if entry and not is_before(border.tails[p + 1], entry[1]) then is_needed = true end
  end
  if is_needed then table.insert(borders, border) end
end
if #borders >= 16 then return {'many', 16} end
if ARGV[3] ~= '1' then
  for _, group in ipairs(redis.call('HKEYS', groups)) do -- bound: the groups of the stream
    if redis.call('EXISTS', states .. group) == 1 then
      for p = 0, total - 1 do -- bound: the partitions
        local open = tonumber(redis.call('HGET', states .. group, ARGV[4] .. p) or 0)
        if open and open > 0 then return {'windows', group, p} end
      end
    end
  end
end
local tails = {}
for p = 0, math.max(total, new) - 1 do tails[p + 1] = last_id(logs .. p) end -- bound: the partitions
table.insert(borders, {old = count, new = new, tails = tails})
redis.call('HSET', map, 'partitions', new, 'version', version + 1, 'most', math.max(total, new), 'borders', cjson.encode(borders))
for _, group in ipairs(redis.call('HKEYS', groups)) do redis.call('PUBLISH', ARGV[2] .. group, 'map') end -- bound: the groups
return {'ok', count, version + 1}
