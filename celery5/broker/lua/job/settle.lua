-- Settle a batch of outcomes: result, state, next attempt or dead letter, and acknowledgement, in one step (I2).
-- KEYS  1 stream of the lane that the outcomes' entries are on
--       2 where its jobs are
--       3 leases of its workers
--       4 scheduled jobs by time
--       5 their envelopes
--       6 dead-letter queue
--       7 the live job of each key
--       8 which sinks take which documents; a sink's stream is named after it
--       9.. result key of each outcome, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that wakes workers
--       4 letter of the lane, '' for the normal one; the entries have it at their end
--       5.. for each outcome: verb, stream entry, job id, message, and three more words:
--           complete: document, ttl in ms, what its key is remembered under or ''
--           retry:    envelope, delay in ms, ttl of a document in ms
--           bury:     envelope, ttl in ms, document
--           release:  envelope, deliveries so far, ttl of a document in ms
--           hold:     envelope, delay in ms, ttl of a document in ms: waits as it is, with the deliveries that it had
--           drop:     envelope, deliveries and this one, ttl of a document in ms: takes the entry off the stream and
--                     touches nothing else; but if the job's place is this very entry, it is a release
--           and after all of them, for each document that sinks are given: its stream entry, the names of the sinks, the
--           document, or '' for the outcome's own
-- Gives how many outcomes this worker still owned, or -1 when it has lost its lease: then nothing was done (I4).
-- An entry that is not pending any more was settled before; it is left alone, so the call may be repeated. A job that
-- was revoked meanwhile (its place says V) is not tried again, given back or buried: it ends as REVOKED. A copy of a job
-- whose place has another entry ends nothing: one that is given up is buried without the job's name, and one of a revoked
-- job goes.
local stream, jobs, leases, due, waiting, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local unique = KEYS[7]
local group, me, lane = ARGV[1], ARGV[2], ARGV[4]
local lease = redis.call('ZSCORE', leases, me)
if not lease or tonumber(lease) < 0 then return -1 end
local clock
-- The time in ms since 1970. Most batches do not ask.
local function now()
  local time = not clock and redis.call('TIME')
  clock = clock or time[1] * 1000 + math.floor(time[2] / 1000)
  return clock
end
local gone, ended, earliest = {}, {}, nil
local given, handed = {}, false
for at = 5 + 6 * (#KEYS - 8), #ARGV, 3 do given[ARGV[at]] = at end -- bound: the documents of this call
local function hand(sinks, document)
  for sink in string.gmatch(sinks or '', '%S+') do -- bound: the sinks of one task
    redis.call('XADD', KEYS[8] .. ':' .. sink, '*', 'document', document)
    handed = true
  end
end
local function hand_as_told(at, document)
  if at then hand(ARGV[at + 1], ARGV[at + 2] ~= '' and ARGV[at + 2] or document) end
end
local function unlock(lock, id)
  if redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
end
-- What a message says may be anything: what fails in the middle of this script would take jobs with it.
local function read(message)
  local readable, envelope = pcall(cjson.decode, message)
  return readable and type(envelope) == 'table' and envelope or {}
end
local function text(value) return type(value) == 'string' and value or '' end
local function whole(value, least)
  return type(value) == 'number' and value >= least and value < 1e15 and math.floor(value) or least
end
local function unlock_by(envelope, id)
  local key = text(envelope.key)
  if key ~= '' then unlock(text(envelope.task) .. ' ' .. key, id) end
end
-- Whether the job was revoked while this worker had it; then it ends here.
local function revoked(id, entry, message, result, ttl)
  local place = id ~= '' and redis.call('HGET', jobs, id)
  if not place or string.sub(place, 1, 1) ~= 'V' then return false end
  if string.sub(place, 2) ~= entry then return true end
  local envelope = read(message)
  local document = cjson.encode({v = 1, id = id, task = text(envelope.task), state = 'REVOKED', worker = me,
    finished = now() / 1000, attempt = whole(envelope.attempt, 1), replays = whole(envelope.replays, 0)})
  redis.call('SET', result, document, 'PX', ttl)
  redis.call('PUBLISH', result, document)
  hand(redis.call('HGET', KEYS[8], 'REVOKED ' .. text(envelope.task)), document)
  ended[#ended + 1] = id
  unlock_by(envelope, id)
  return true
end
-- Whether this entry is the job, as far as Redis knows: a copy of one that is elsewhere, or has ended, is not.
local function is_it(id, entry, result)
  local place = id ~= '' and redis.call('HGET', jobs, id)
  if place then return string.sub(place, 2) == entry end
  return id ~= '' and redis.call('EXISTS', result) == 0
end
-- The lane that a job comes back to when it is due: its own. One that was handed to this worker has that of its priority.
local function home(message)
  if lane ~= 'g' then return lane end
  return ({high = 'h', low = 'l'})[text(read(message).priority)] or ''
end
-- How many workers went down with the job so far: what is held keeps that (I5).
local function deliveries(entry)
  local there = redis.call('XRANGE', stream, entry, entry)[1]
  for n = 1, there and #there[2] or 0, 2 do -- bound: the fields of an entry, as its sender wrote them
    if there[2][n] == 'deliveries' then return string.match(there[2][n + 1], '^%d+$') or '' end
  end
  return ''
end
for n = 9, #KEYS do -- bound: the outcomes of this call, 256 at most
  local at = 5 + 6 * (n - 9)
  local verb, entry, id, message, number = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local extra, on_stream = ARGV[at + 5], lane == '' and entry or string.sub(entry, 1, -2)
  if redis.call('XACK', stream, group, on_stream) == 1 then
    gone[#gone + 1] = on_stream
    if verb == 'drop' and id ~= '' then
      local place = redis.call('HGET', jobs, id)
      if place and string.sub(place, 2) == entry then verb = 'release' end
    end
    -- Nobody reads what was handed to a worker and comes back on that lane.
    if verb == 'release' and lane == 'g' then verb, number = 'hold', 0 end
    if verb == 'complete' then
      redis.call('SET', KEYS[n], message, 'PX', number)
      redis.call('PUBLISH', KEYS[n], message)
      hand_as_told(given[entry], message)
      ended[#ended + 1] = id
      if extra ~= '' then unlock(extra, id) end
    elseif revoked(id, entry, message, KEYS[n], verb == 'bury' and number or extra) then -- it ended, or was a copy
    elseif verb == 'retry' or verb == 'hold' then
      local place = (verb == 'retry' and 'R' or 'H' .. deliveries(on_stream)) .. home(message)
      local when = now() + tonumber(number)
      redis.call('ZADD', due, when, id)
      redis.call('HSET', waiting, id, message)
      redis.call('HSET', jobs, id, place)
      if not earliest or when < earliest then earliest = when end
    elseif verb == 'bury' then
      local grave = redis.call('XADD', dead, '*', 'job', message, 'document', extra)
      if is_it(id, entry, KEYS[n]) then
        redis.call('HSET', jobs, id, 'X' .. grave)
        redis.call('SET', KEYS[n], extra, 'PX', number)
        redis.call('PUBLISH', KEYS[n], extra)
        hand_as_told(given[entry], extra)
        unlock_by(read(message), id)
      end
    elseif verb == 'release' then
      local back = redis.call('XADD', stream, '*', 'job', message, 'deliveries', number)
      if id ~= '' then redis.call('HSET', jobs, id, 'S' .. back .. lane) end
    end
  end
end
if #gone > 0 then redis.call('XDEL', stream, unpack(gone)) end
if #ended > 0 then redis.call('HDEL', jobs, unpack(ended)) end
if handed then redis.call('PUBLISH', KEYS[8], '') end
if earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == earliest then
  redis.call('PUBLISH', ARGV[3], string.format('%.0f', earliest))
end
return #gone
