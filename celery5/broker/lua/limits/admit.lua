-- Decide for jobs that a worker has read whether they may run: each takes a slot of its limit, or goes to its waiting list.
-- KEYS  1 stream of the normal lane
--       2 stream of its lane `high`
--       3 stream of its lane `low`
--       4 stream of its lane `handed`
--       5 leases of its workers
--       6 where its jobs are
--       7 Commands of waiting jobs
--       8 scheduled jobs by time
--       9 slots
--       10 how many are taken
--       11 how many jobs wait
--       12 prefix of the waiting lists
--       13.. result key of each job, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that notifies workers of free slots
--       4 rules: JSON, a list of those that the jobs go by
--       5.. for each job: its entry with its lane's letter, its id, its waiting list, how many workers died with it, when it
--           expires (ms since 1970, or ''), and the mode: `run` it if it may; `wait`, whether it may or not; `count`
--           it, for it has begun
-- Returns -1 when the worker has lost its lease (then nothing was done), else for each job: 1 it may run; 0 it waits; -1 it
-- was revoked; -2 it is not this worker's, or was a copy of a job
-- with another place: it is deleted. After that, for each rule,
-- in how many ms its rate lets the next one through (0: it does not wait for that). Repeating the call returns the same.
local streams = {[''] = KEYS[1], h = KEYS[2], l = KEYS[3], g = KEYS[4]}
local at = use_keys {jobs = KEYS[6], waiting = KEYS[7], due = KEYS[8], slots = KEYS[9], taken = KEYS[10], held = KEYS[11],
  prefix = KEYS[12], handed = KEYS[4]}
local group, me = ARGV[1], ARGV[2]
if not has_lease(KEYS[5], me) then return -1 end
local rules, results, open = {}, {}, {}
for _, rule in ipairs(cjson.decode(ARGV[4])) do rules[rule.task] = rule end -- bound: the tasks of these jobs
-- Read for all jobs at once: their places and slots, and the messages of each lane.
local entries, ids, spans, messages = {}, {}, {}, {}
local function is_before(one, other)
  local ms, seq = string.match(one, '^(%d+)-(%d+)')
  local other_ms, other_seq = string.match(other, '^(%d+)-(%d+)')
  if ms == other_ms then return tonumber(seq) < tonumber(other_seq) end
  return tonumber(ms) < tonumber(other_ms)
end
for n = 1, #KEYS - 12 do -- bound: the jobs of this call
  entries[n], ids[n] = ARGV[6 * n - 1], ARGV[6 * n]
  local on_stream, lane = string.match(entries[n], '^([%d-]*)(%a?)')
  local span = spans[lane] or {first = on_stream, last = on_stream, count = 0, gone = {}}
  if is_before(on_stream, span.first) then span.first = on_stream end
  if is_before(span.last, on_stream) then span.last = on_stream end
  span.count, spans[lane] = span.count + 1, span
end
local limits = {}
for n = 1, #KEYS - 12 do -- bound: the jobs of this call
  local task, _, token = string.match(ARGV[6 * n + 1], '^([^ ]*) ([^ ]*) ([^ ]*)$')
  limits[2 * n - 1], limits[2 * n] = task .. ' ' .. token, task .. ' ' .. token .. ' ' .. me
end
if limits[1] then read_taken(at, limits) end
local places, has_slot = {}, {}
for n, place in ipairs(ids[1] and redis.call('HMGET', at.jobs, unpack(ids)) or {}) do places[ids[n]] = place or '' end -- bound: as above
for n, slot in ipairs(ids[1] and redis.call('HMGET', at.slots, unpack(entries)) or {}) do has_slot[entries[n]] = slot end -- bound: as above
-- Which of them are pending for this worker. Of a span with very many others some may be missing: these are looked up one
-- by one.
local MOST = 1000
local function is_pending(entry, lane, on_stream)
  local span = spans[lane]
  if not span.pending then
    local found = redis.pcall('XPENDING', streams[lane], group, span.first, span.last, MOST, me)
    span.pending, span.cut = {}, #found == MOST
    for _, one in ipairs(found.err and {} or found) do span.pending[one[1]] = true end -- bound: MOST
  end
  if span.pending[on_stream] then
    span.pending[on_stream] = nil
    return true
  end
  return span.cut and #redis.call('XPENDING', streams[lane], group, on_stream, on_stream, 1, me) == 1
end
local function message_of(entry, lane, on_stream)
  local span = spans[lane]
  local function read(first, last, count)
    for _, one in ipairs(redis.call('XRANGE', streams[lane], first, last, 'COUNT', count)) do -- bound: the jobs of this call
      for f = 1, #one[2], 2 do -- bound: the fields of an entry
        if one[2][f] == 'job' then messages[one[1] .. lane] = one[2][f + 1] end
      end
    end
  end
  if not span.read then
    read(span.first, span.last, span.count)
    span.read = true
  end
  if not messages[entry] then read(on_stream, on_stream, 1) end
  return messages[entry]
end
-- The score of an entry in its waiting list: by priority, then by age. It is exact, since it is below 2^53.
local function score(entry, lane)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)')
  local level = ({h = 0, l = 2})[lane] or 1
  return string.format('%.0f', ms * 1000 + math.min(tonumber(seq), 999) + level * 2e15)
end
-- Move an entry of ours from its stream to its waiting list.
local lists = {}
local function move_to_list(n, entry, lane, on_stream, id, list, place)
  local message = message_of(entry, lane, on_stream)
  if not is_pending(entry, lane, on_stream) then return string.sub(place, 1, 1) == 'G' and 0 or -2 end
  spans[lane].gone[#spans[lane].gone + 1] = on_stream
  if has_slot[entry] then free_slot(at, entry) end
  if not message then return -2 end
  -- A copy: the job has another place, or has ended.
  if place ~= '' and string.sub(place, 2) ~= entry then return -2 end
  if place == '' and redis.call('EXISTS', KEYS[12 + n]) == 1 then return -2 end
  local deaths, expires = ARGV[6 * n + 2], ARGV[6 * n + 3]
  if not lists[list] then
    lists[list] = {}
    lists[#lists + 1] = list
  end
  local scored = lists[list]
  scored[#scored + 1], scored[#scored + 2] = score(on_stream, lane), id
  places[id] = 'G' .. (deaths == '0' and '' or deaths) .. ' ' .. list
  later(at, 'HSET', at.waiting, id, with_sent(message, entry))
  later(at, 'HSET', at.jobs, id, places[id])
  if expires ~= '' then
    later(at, 'ZADD', at.due, expires, id)
    count(at, at.held, ' expires', 1)
  end
  return 0
end
for n = 1, #KEYS - 12 do -- bound: the jobs of this call
  local first = 6 * n - 1
  local entry, id, list, mode = ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 5]
  local on_stream, lane = string.match(entry, '^([%d-]*)(%a?)')
  local task, fair, token = string.match(list, '^([^ ]*) ([^ ]*) ([^ ]*)$')
  local rule, may, place = rules[task], false, places[id]
  -- settle_limited.lua takes what has a slot on the lane `handed` for the job. So a copy there gets none.
  local is_copy = lane == 'g' and string.sub(place, 2) ~= entry
  if is_copy then
    may = false
  elseif mode == 'run' then
    may = slots_left(at, rule, token, me) > 0 and begins_in(at, rule, me) == 0
      and not lists[list] and redis.call('EXISTS', at.prefix .. 'line ' .. list) == 0
  elseif mode == 'count' then
    may = redis.call('XPENDING', streams[lane], group, on_stream, on_stream, 1)[1] ~= nil
  end
  if string.sub(place, 1, 1) == 'V' and string.sub(place, 2) == entry and mode ~= 'count' then
    results[n] = -1
  elseif mode ~= 'wait' and has_slot[entry] then
    results[n] = 1
  elseif may then
    take_slot(at, entry, task .. ' ' .. token, me)
    if mode == 'run' then note_start(at, rule, me) end
    results[n] = 1
  elseif mode == 'count' then
    results[n] = -2
  else
    results[n] = move_to_list(n, entry, lane, on_stream, id, list, place)
    if results[n] == 0 and slots_left(at, rule, token, me) > 0 then open[task] = true end
  end
end
for lane, span in pairs(spans) do -- bound: the four lanes
  if span.gone[1] then
    redis.call('XACK', streams[lane], group, unpack(span.gone))
    redis.call('XDEL', streams[lane], unpack(span.gone))
  end
end
add_to_lists(at, lists)
-- Where a job waits that could run, workers with capacity are notified.
local waits = #results
for n, rule in ipairs(cjson.decode(ARGV[4])) do -- bound: the tasks of these jobs
  local wait = begins_in(at, rule, me)
  if wait > 0 and not somebody_waits(at, rule.task) then wait = 0 end
  results[waits + n] = wait
  if open[rule.task] and wait == 0 and not rule.suspended then redis.call('PUBLISH', ARGV[3], rule.task) end
end
write(at)
if lists[1] then note_unlimited(at, cjson.decode(ARGV[4])) end
return results
