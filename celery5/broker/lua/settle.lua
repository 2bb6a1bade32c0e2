-- Settle a batch of outcomes: result, state, next attempt or dead letter, and acknowledgement, in one step (I2).
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 leases of its workers
--       4 scheduled jobs by time
--       5 their envelopes
--       6 dead-letter queue
--       7 the live job of each key
--       8.. result key of each outcome, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that wakes workers
--       4.. for each outcome: verb, stream entry, job id, message, and three more words:
--           complete: document, ttl in ms, what its key is remembered under or ''
--           retry:    envelope, delay in ms, ttl of a document in ms
--           bury:     envelope, ttl in ms, document
--           release:  envelope, deliveries so far, ttl of a document in ms
--           drop:     envelope, deliveries and this one, ttl of a document in ms: takes the entry off the stream and
--                     touches nothing else; but if the job's place is this very entry, it is a release
-- Gives how many outcomes this worker still owned, or -1 when it has lost its lease: then nothing was done (I4).
-- An entry that is not pending any more was settled before; it is left alone, so the call may be repeated. A job that
-- was revoked meanwhile (its place says V) is not tried again and not given back: it ends as REVOKED.
local stream, jobs, leases, due, waiting, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local unique = KEYS[7]
local group, me = ARGV[1], ARGV[2]
local lease = redis.call('ZSCORE', leases, me)
if not lease or tonumber(lease) < 0 then return -1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone, ended, earliest = {}, {}, nil
local function unlock(lock, id)
  if redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
end
local function unlock_by(message, id)
  local readable, envelope = pcall(cjson.decode, message)
  if readable and type(envelope) == 'table' and type(envelope.key) == 'string' and envelope.key ~= '' then
    unlock(envelope.task .. ' ' .. envelope.key, id)
  end
end
-- Whether the job was revoked while this worker had it; then it ends here.
local function revoked(id, message, result, ttl)
  local place = id ~= '' and redis.call('HGET', jobs, id)
  if not place or string.sub(place, 1, 1) ~= 'V' then return false end
  local readable, envelope = pcall(cjson.decode, message)
  local fields = {v = 1, id = id, task = '', state = 'REVOKED', worker = me, finished = now / 1000}
  if readable and type(envelope) == 'table' then fields.task, fields.attempt = envelope.task, envelope.attempt end
  local document = cjson.encode(fields)
  redis.call('SET', result, document, 'PX', ttl)
  redis.call('PUBLISH', result, document)
  ended[#ended + 1] = id
  unlock_by(message, id)
  return true
end
for n = 8, #KEYS do
  local at = 4 + 6 * (n - 8)
  local verb, entry, id, message, number = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local extra = ARGV[at + 5]
  if redis.call('XACK', stream, group, entry) == 1 then
    gone[#gone + 1] = entry
    if verb == 'drop' and id ~= '' then
      local place = redis.call('HGET', jobs, id)
      if place and string.sub(place, 2) == entry then verb = 'release' end
    end
    if verb == 'complete' then
      redis.call('SET', KEYS[n], message, 'PX', number)
      redis.call('PUBLISH', KEYS[n], message)
      ended[#ended + 1] = id
      if extra ~= '' then unlock(extra, id) end
    elseif (verb == 'retry' or verb == 'release') and revoked(id, message, KEYS[n], extra) then -- it ended
    elseif verb == 'retry' then
      local when = now + tonumber(number)
      redis.call('ZADD', due, when, id)
      redis.call('HSET', waiting, id, message)
      redis.call('HSET', jobs, id, 'R')
      if not earliest or when < earliest then earliest = when end
    elseif verb == 'bury' then
      local grave = redis.call('XADD', dead, '*', 'job', message, 'document', extra)
      if id ~= '' then
        redis.call('HSET', jobs, id, 'X' .. grave)
        redis.call('SET', KEYS[n], extra, 'PX', number)
        redis.call('PUBLISH', KEYS[n], extra)
        unlock_by(message, id)
      end
    elseif verb == 'release' then
      local back = redis.call('XADD', stream, '*', 'job', message, 'deliveries', number)
      if id ~= '' then redis.call('HSET', jobs, id, 'S' .. back) end
    end
  end
end
if #gone > 0 then redis.call('XDEL', stream, unpack(gone)) end
if #ended > 0 then redis.call('HDEL', jobs, unpack(ended)) end
if earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == earliest then
  redis.call('PUBLISH', ARGV[3], string.format('%.0f', earliest))
end
return #gone
