-- Ask for jobs that a worker has read whether they may run: each takes a slot at its gate, or goes to its waiting room.
-- KEYS  1 stream of the normal lane
--       2 stream of its lane `high`
--       3 stream of its lane `low`
--       4 stream of its lane `handed`
--       5 leases of its workers
--       6 where its jobs are
--       7 envelopes of waiting jobs
--       8 scheduled jobs by time
--       9 slots
--       10 how many are taken
--       11 how many jobs wait
--       12 prefix of the waiting room
--       13.. result key of each job, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that tells workers of free slots
--       4 rules: JSON, a list of those that the jobs go by
--       5.. for each job: its entry with its lane's letter, its id, its line, how many workers died with it, when it
--           expires (ms since 1970, or ''), and what is asked: `run` it if it may; `wait`, whether it may or not; `count`
--           it, for it has begun
-- Gives -1 when the worker has lost its lease (then nothing was done), else for each job: 1 it may run; 0 it waits; -1 it
-- was revoked; -2 it is not this worker's, or was a copy of one that is elsewhere: it is gone. After that, for each rule,
-- in how many ms its rate lets the next one through (0: it does not wait for that). Repeating the call gives the same.
local streams = {[''] = KEYS[1], h = KEYS[2], l = KEYS[3], g = KEYS[4]}
local at = keys_of_gates {jobs = KEYS[6], waiting = KEYS[7], due = KEYS[8], slots = KEYS[9], taken = KEYS[10], held = KEYS[11],
  room = KEYS[12], handed = KEYS[4]}
local group, me = ARGV[1], ARGV[2]
local lease = redis.call('ZSCORE', KEYS[5], me)
if not lease or tonumber(lease) < 0 then return -1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rules, told, open = {}, {}, {}
for _, rule in ipairs(cjson.decode(ARGV[4])) do rules[rule.task] = rule end
-- Where an entry stands in its line: by its age, the urgent ones first. Exact: it is below 2^53.
local function score(entry, lane)
  local ms, seq = string.match(entry, '^(%d+)-(%d+)')
  local level = ({h = 0, l = 2})[lane] or 1
  return string.format('%.0f', ms * 1000 + math.min(tonumber(seq), 999) + level * 2e15)
end
-- Move an entry of ours from its stream to its line.
local function to_the_line(n, entry, lane, on_stream, id, line, place)
  local there, message = redis.call('XRANGE', streams[lane], on_stream, on_stream)[1], nil
  if redis.call('XACK', streams[lane], group, on_stream) == 0 then
    return string.sub(place, 1, 1) == 'G' and 0 or -2
  end
  redis.call('XDEL', streams[lane], on_stream)
  free_slot(at, entry)
  for f = 1, there and #there[2] or 0, 2 do
    if there[2][f] == 'job' then message = there[2][f + 1] end
  end
  if not message then return -2 end
  -- A copy: the job is elsewhere, or has ended.
  if place ~= '' and string.sub(place, 2) ~= entry then return -2 end
  if place == '' and redis.call('EXISTS', KEYS[12 + n]) == 1 then return -2 end
  local deaths, expires = ARGV[6 * n + 2], ARGV[6 * n + 3]
  line_up(at, line, {score(on_stream, lane), id})
  redis.call('HSET', at.waiting, id, message)
  redis.call('HSET', at.jobs, id, 'G' .. (deaths == '0' and '' or deaths) .. ' ' .. line)
  if expires ~= '' then
    redis.call('ZADD', at.due, expires, id)
    count(at, at.held, ' expires', 1)
  end
  return 0
end
for n = 1, #KEYS - 12 do
  local first = 6 * n - 1
  local entry, id, line, asked = ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 5]
  local on_stream, lane = string.match(entry, '^([%d-]*)(%a?)')
  local task, fair, token = string.match(line, '^([^ ]*) ([^ ]*) ([^ ]*)$')
  local rule, may, place = rules[task], false, redis.call('HGET', at.jobs, id) or ''
  if asked == 'run' then
    may = slots_left(at, rule, token, me) > 0 and begins_in(at, rule, me, now) == 0
      and redis.call('EXISTS', at.room .. 'line ' .. line) == 0
  elseif asked == 'count' then
    may = redis.call('XPENDING', streams[lane], group, on_stream, on_stream, 1)[1] ~= nil
  end
  if string.sub(place, 1, 1) == 'V' and string.sub(place, 2) == entry and asked ~= 'count' then
    told[n] = -1
  elseif asked ~= 'wait' and redis.call('HEXISTS', at.slots, entry) == 1 then
    told[n] = 1
  elseif may then
    take_slot(at, entry, task .. ' ' .. token, me)
    if asked == 'run' then note_start(at, rule, me, now) end
    told[n] = 1
  elseif asked == 'count' then
    told[n] = -2
  else
    told[n] = to_the_line(n, entry, lane, on_stream, id, line, place)
    if told[n] == 0 and slots_left(at, rule, token, me) > 0 then open[task] = true end
  end
end
-- Where somebody waits who need not, whoever has room is told.
local waits = #told
for n, rule in ipairs(cjson.decode(ARGV[4])) do
  local wait = begins_in(at, rule, me, now)
  if wait > 0 and not somebody_waits(at, rule.task) then wait = 0 end
  told[waits + n] = wait
  if open[rule.task] and wait == 0 and not rule.suspended then redis.call('PUBLISH', ARGV[3], rule.task) end
end
write(at)
return told
