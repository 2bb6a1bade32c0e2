-- Claim a portion of the records of one partition that wait for the archive. A portion that was claimed before and is not
-- archived has the same records again.
-- KEYS  1 map of the stream
--       2 who takes them: by partition `<free at, in ms> <last id of the portion> <failures> <worker>`
--       3 prefix of the records that wait for the archive
-- ARGV  1 this worker
--       2 for how long in ms
--       3 most records
--       4 most bytes, unless it is one record
--       5 the partition that this worker has had before, -1 for none: the others come first
-- Returns {how many records wait in all partitions, ms until a portion may be free (-1 for none), partition, last id, how
-- often it has failed, entries}; of these only two when there is nothing to claim.
local map, takers, waiting = unpack(KEYS)
local worker, most, most_bytes, before = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local chosen, last, failures, free_in = nil, '', 0, -1
local flat = redis.call('HGETALL', takers)
for n = 1, #flat, 2 do -- bound: the partitions
  local p = tonumber(flat[n])
  local free_at, its_last, its_failures, owner = string.match(flat[n + 1], '^(%d+) (%S+) (%d+) (.*)$')
  local wait = (tonumber(free_at) or 0) - now
  if wait <= 0 or owner == worker then
    local is_next = not chosen or ((p > before) == (chosen > before) and p < chosen) or (p > before and chosen <= before)
    if is_next then chosen, last, failures = p, its_last or '', tonumber(its_failures) or 0 end
  elseif free_in < 0 or wait < free_in then
    free_in = wait
  end
end
local counts = redis.call('HMGET', map, 'archived', 'archive-taken')
local total = (tonumber(counts[1]) or 0) - (tonumber(counts[2]) or 0)
if not chosen then return {total, free_in} end
local entries, bytes, at, is_full = {}, 0, '-', false
repeat -- bound: the records of a portion
  local found = redis.call('XRANGE', waiting .. chosen, at, last == '' and '+' or last, 'COUNT', 20)
  for _, entry in ipairs(found) do -- bound: 20
    for _, word in ipairs(entry[2]) do bytes = bytes + #word end -- bound: the words of one record
    is_full = is_full or (last == '' and #entries > 0 and (bytes > most_bytes or #entries >= most))
    if not is_full then entries[#entries + 1] = entry end
    at = '(' .. entry[1]
  end
until is_full or #found < 20
if #entries == 0 then
  redis.call('HDEL', takers, chosen)
  return {total, 0}
end
last = entries[#entries][1]
redis.call('HSET', takers, chosen, string.format('%d %s %d %s', now + ARGV[2], last, failures, worker))
return {total, free_in, chosen, last, failures, entries}
