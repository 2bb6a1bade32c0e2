-- Commit what was done in partitions that this member owns: the cursor together with its outputs, state and dead records.
-- KEYS  1 prefix of the partitions of the group
--       2 keyed state of the group
--       3 prefix of its outboxes
--       4 its dead records
--       5 its parked keys
--       6 prefix of the logs of those
--       7 prefix of the logs of the stream
-- ARGV  1 incarnation of the owner
--       2.. for each partition: its number, epoch, the cursor so far, the new cursor, the name of the ownership, the
--           number of the commit in that, from 1, the ids beyond the cursor that are done, 1 when records behind the new
--           cursor may still have killed the last owner, so that its death is remembered;
--           how many parked records are done: key, id; how many outputs there are, and those; how many changes of state, and those as key, value ('' removes); how
--           many dead records, and for each of them how many words it has, and those: field, value, ...; how many
--           changes of parked keys: key, what is said of it ('': its release begins), how many words the record has (0:
--           none, it replaces what is said), and those
-- Returns for each partition 1 when it is committed, now or by an earlier call with the same arguments, and 0 when this
-- incarnation does not own it in that epoch any more, the cursor is another, a parked record is not there any more, or the log never
-- had the record at the new cursor: then nothing of it is changed.
local partitions, state, outboxes, dead, parked, parked_logs, logs = unpack(KEYS)
local incarnation = ARGV[1]
local verdicts = {}
local at = 2
-- Return the next argument.
local function take()
  at = at + 1
  return ARGV[at - 1]
end
-- Count records of parked keys.
local function count_parked(change)
  local count = tonumber(redis.call('HGET', parked, 'records') or 0) or 0
  redis.call('HSET', parked, 'records', math.max(0, count + change))
end
-- Return whether a log has had a record. One that was read from a primary which is cut off may not be here: its place
-- has another record then, which a cursor behind it would skip. Trimming begins at the front of a log.
local function has_had(log, id)
  local entry = redis.call('XRANGE', log, id, '+', 'COUNT', 1)[1]
  if not entry then return not is_before(last_id(log), id) end
  if entry[1] == id then return true end
  local _, number = split_id(id)
  local _, following = split_id(entry[1])
  return following > number and #redis.call('XREVRANGE', log, id, '-', 'COUNT', 1) == 0
end
while at <= #ARGV do -- bound: the partitions of one call
  local p, epoch, from, to, name, number, ahead, keeps_deaths = take(), take(), take(), take(), take(), tonumber(take()), take(), take()
  local key = partitions .. p
  local found = redis.call('HMGET', key, 'owner', 'epoch', 'cursor', 'commit')
  local is_owner = found[1] == incarnation and found[2] == epoch
  local last_name, last = string.match(found[4] or '', '^(%x+)%-(%d+)$')
  last = last_name == name and tonumber(last) or 0
  local is_done = is_owner and last == number
  local is_valid = is_owner and last == number - 1 and found[3] == from and (to == from or has_had(logs .. p, to))
  local released = {}
  for _ = 1, tonumber(take()) do -- bound: the released records of one commit
    local name, entry = take(), take()
    released[#released + 1], released[#released + 2] = name, entry
    -- Another owner may have done it: after a change of the number of partitions the key may be of another partition.
    if is_valid and #redis.call('XRANGE', parked_logs .. name, entry, entry) == 0 then is_valid = false end
  end
  for _ = 1, tonumber(take()) do -- bound: the outputs of one commit
    local output = take()
    if is_valid then redis.call('XADD', outboxes .. p, '*', 'o', output) end
  end
  for _ = 1, tonumber(take()) do -- bound: the changes of state of one commit
    local name, value = take(), take()
    if is_valid and value == '' then redis.call('HDEL', state, name) end
    if is_valid and value ~= '' then redis.call('HSET', state, name, value) end
  end
  for _ = 1, tonumber(take()) do -- bound: the dead records of one commit
    local words = tonumber(take())
    if is_valid then redis.call('XADD', dead, '*', unpack(ARGV, at, at + words - 1)) end
    at = at + words
  end
  for _ = 1, tonumber(take()) do -- bound: the parked records of one commit
    local name, about, words = take(), take(), tonumber(take())
    local field = 'key:' .. name
    local is_parked = is_valid and redis.call('HEXISTS', parked, field) == 1
    if is_parked and about == '' then
      local tries = redis.call('HGET', parked, 'tries:' .. name)
      redis.call('HSET', parked, 'tries:' .. name, (tonumber(tries or 0) or 0) + 1)
    elseif is_valid and (words == 0) == is_parked then
      redis.call('HSET', parked, field, about)
      redis.call('HDEL', parked, 'tries:' .. name)
    end
    if is_valid and words > 0 then
      redis.call('XADD', parked_logs .. name, '*', unpack(ARGV, at, at + words - 1))
      count_parked(1)
    end
    at = at + words
  end
  for n = 1, #released, 2 do -- bound: the released records of one commit
    local name, entry = released[n], released[n + 1]
    if is_valid then
      redis.call('XDEL', parked_logs .. name, entry)
      redis.call('HDEL', parked, 'tries:' .. name)
      count_parked(-1)
      if redis.call('XLEN', parked_logs .. name) == 0 then
        redis.call('UNLINK', parked_logs .. name)
        redis.call('HDEL', parked, 'key:' .. name)
      end
    end
  end
  if is_valid then
    redis.call('HSET', key, 'cursor', to, 'ahead', ahead, 'commit', name .. '-' .. number)
    if to ~= from and keeps_deaths ~= '1' then redis.call('HSET', key, 'deaths', 0) end
  end
  verdicts[#verdicts + 1] = (is_valid or is_done) and 1 or 0
end
return verdicts
