-- Append records to the partitions of a stream: all of them or none.
-- KEYS  1 map of the stream
--       2 its groups
--       3 prefix of its logs
--       4 prefix of the partitions of its groups
--       5 what came from each outbox
--       6 reply to this sending, for its repetition ('' for none is passed as KEYS 5)
--       7 prefix of the records that wait for the archive
--       8 who takes those
-- ARGV  1 version of the map by which the producer chose the partitions, 0 when it has none
--       2 number of partitions of a stream that does not exist yet
--       3 most records of a partition
--       4 what happens at more unread ones: refuse, drop, archive
--       5 ms after which a record that all groups have read may go, 0 for never
--       6 ms for which the reply is kept, 0 for not at all
--       7 outbox that the records come from ('' for none)
--       8 number of records
--       9.. for each record: its partition, its time in ms ('' for now), its id in that outbox ('' for
--         none), how many words it has, and those: field, value, ...
-- Returns {'ok', the partition and the id of each record ('' for one that came before), how many unread records were
-- dropped}; {'stale', number of partitions, version} when the producer has an old map; {'full', partition, group, how
-- many are unread, how many wait for the archive, how many records of this call are for it} or {'early', partition, its
-- last id}. Nothing is appended then.
local map, groups, logs, partitions, relayed, sent, waiting, takers = unpack(KEYS)
local most, policy, age, keep, source, total = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8])
if keep ~= '0' then
  local reply = redis.call('GET', sent)
  if reply then return cmsgpack.unpack(reply) end
end
local known = redis.call('HMGET', map, 'partitions', 'version')
if not known[1] then
  known = {ARGV[2], '1'}
  redis.call('HSET', map, 'partitions', ARGV[2], 'version', 1)
end
if ARGV[1] ~= known[2] then return {'stale', tonumber(known[1]), tonumber(known[2])} end
local now = now_ms()
local before = source ~= '' and redis.call('HGET', relayed, source) or '0-0'
-- What is sent to each partition, before anything changes.
local tails, at = {}, 9
for _ = 1, total do -- bound: the records of one call
  local partition, time, origin, words = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  if origin == '' or is_before(before, origin) then
    local tail = tails[partition]
    if not tail then
      tail = {log = logs .. partition, count = 0}
      tail.ms, tail.n = split_id(last_id(tail.log))
      tail.length = redis.call('XLEN', tail.log)
      tail.time = tail.ms
      tails[partition] = tail
    end
    if time ~= '' then
      if tonumber(time) < tail.time then return {'early', tonumber(partition), make_id(tail.time, tail.n)} end
      tail.time = tonumber(time)
    elseif tail.time < now then
      tail.time = now
    end
    tail.count = tail.count + 1
  end
  at = at + 4 + words
end
-- Nothing that a group has not read is trimmed, unless the policy says so. With an archive the oldest ones go there: as
-- many as are too many, and of earlier ones, as after a change of what is kept, some in each call.
local dropped, names, spare = 0, nil, 200
for partition, tail in pairs(tails) do -- bound: the partitions of these records
  tail.unread = 0
  if tail.length + tail.count > most then
    names = names or redis.call('HKEYS', groups)
    for _, group in ipairs(names) do -- bound: the groups of the stream
      local cursor = redis.call('HGET', partitions .. group .. ':' .. partition, 'cursor') or '0-0'
      local _, read = split_id(cursor)
      local unread = math.min(tail.length, math.max(0, tail.n - read)) + tail.count
      if unread > most and policy == 'refuse' then return {'full', tonumber(partition), group, unread - tail.count, 0, tail.count} end
      if unread > tail.unread then tail.unread, tail.slowest, tail.cursor = unread, group, cursor end
    end
    if tail.unread > most and policy == 'archive' then
      tail.excess = math.min(tail.unread - most, tail.count + spare)
      spare = spare - math.max(0, tail.excess - tail.count)
      local before = redis.call('XLEN', waiting .. partition)
      if before + tail.excess > most then return {'full', tonumber(partition), tail.slowest, tail.unread - tail.count, before, tail.count} end
    end
  end
end
-- Move the oldest unread records of a partition to those that wait for the archive.
local function archive(partition, tail)
  local first, last, moved = nil, nil, 0
  for _, entry in ipairs(redis.call('XRANGE', tail.log, '(' .. tail.cursor, '+', 'COUNT', tail.excess)) do -- bound: the excess
    local added = redis.pcall('XADD', waiting .. partition, entry[1], unpack(entry[2]))
    if type(added) == 'table' and added.err then break end -- a foreign entry is in the way: the records stay in the log
    first, last, moved = first or entry[1], entry[1], moved + 1
  end
  if moved == 0 then return end
  local ms, n = split_id(last)
  redis.call('XTRIM', tail.log, 'MINID', make_id(ms, n + 1))
  redis.call('HINCRBY', map, 'archived', moved)
  if redis.call('HEXISTS', takers, partition) == 0 then redis.call('HSET', takers, partition, '') end
  -- Which numbers were archived, of the last ones that went one after the other.
  local _, from = split_id(first)
  local known = redis.call('HGET', map, 'archived:' .. partition)
  local begin, finish = string.match(known or '', '^(%d+) (%d+)$')
  if tonumber(finish) == from - 1 then from = tonumber(begin) end
  redis.call('HSET', map, 'archived:' .. partition, string.format('%d %d', from, n))
end
local ids = {}
at = 9
for _ = 1, total do -- bound: the records of one call
  local partition, time, origin, words = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  if origin == '' or is_before(before, origin) then
    local tail = tails[partition]
    tail.n = tail.n + 1
    local ms = time ~= '' and tonumber(time) or math.max(tail.ms, now)
    if ms ~= tail.ms or not tail.prefix then tail.ms, tail.prefix = ms, string.format('%.0f-', ms) end
    local id = tail.prefix .. string.format('%d', tail.n)
    if words == 2 then
      redis.call('XADD', tail.log, id, ARGV[at], ARGV[at + 1])
    else
      redis.call('XADD', tail.log, id, unpack(ARGV, at, at + words - 1))
    end
    ids[#ids + 1] = partition
    ids[#ids + 1] = id
    if origin ~= '' then before = origin end
  else
    ids[#ids + 1] = partition
    ids[#ids + 1] = ''
  end
  at = at + words
end
for partition, tail in pairs(tails) do -- bound: the partitions of these records
  if tail.excess then
    archive(partition, tail)
  elseif tail.length + tail.count > most then
    redis.call('XTRIM', tail.log, 'MAXLEN', '~', most)
    if tail.unread > most then
      local lost = tail.unread - redis.call('XLEN', tail.log)
      if lost > 0 then
        dropped = dropped + lost
        redis.call('HINCRBY', map, 'dropped', lost)
      end
    end
  end
  if age > 0 then
    local first = make_id(math.max(0, now - age), 0)
    names = names or redis.call('HKEYS', groups)
    for _, group in ipairs(names) do -- bound: the groups of the stream
      local cursor = redis.call('HGET', partitions .. group .. ':' .. partition, 'cursor') or '0-0'
      if is_before(cursor, first) then first = cursor end
    end
    redis.call('XTRIM', tail.log, 'MINID', '~', first)
  end
end
if source ~= '' then redis.call('HSET', relayed, source, before) end
local reply = {'ok', ids, dropped}
if keep ~= '0' then redis.call('SET', sent, cmsgpack.pack(reply), 'PX', keep) end
return reply
