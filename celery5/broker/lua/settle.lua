-- Settle a batch of outcomes: result, state, next attempt or dead letter, and acknowledgement, in one step (I2).
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 leases of its workers
--       4 scheduled jobs by time
--       5 their envelopes
--       6 dead-letter queue
--       7.. result key of each outcome, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that wakes workers
--       4.. for each outcome: verb, stream entry, job id, message, and three more words:
--           complete: document, ttl in ms, 0
--           retry:    envelope, delay in ms, 0
--           bury:     envelope, ttl in ms, document
--           release:  envelope, deliveries so far, 0
-- Gives how many outcomes this worker still owned, or -1 when it has lost its lease: then nothing was done (I4).
-- An entry that is not pending any more was settled before; it is left alone, so the call may be repeated.
local stream, jobs, leases, due, waiting, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local group, me = ARGV[1], ARGV[2]
local lease = redis.call('ZSCORE', leases, me)
if not lease or tonumber(lease) < 0 then return -1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone, ended, earliest = {}, {}, nil
for n = 7, #KEYS do
  local at = 4 + 6 * (n - 7)
  local verb, entry, id, message, number = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  if redis.call('XACK', stream, group, entry) == 1 then
    gone[#gone + 1] = entry
    if verb == 'complete' then
      redis.call('SET', KEYS[n], message, 'PX', number)
      redis.call('PUBLISH', KEYS[n], message)
      ended[#ended + 1] = id
    elseif verb == 'retry' then
      local when = now + tonumber(number)
      redis.call('ZADD', due, when, id)
      redis.call('HSET', waiting, id, message)
      redis.call('HSET', jobs, id, 'R')
      if not earliest or when < earliest then earliest = when end
    elseif verb == 'bury' then
      local document = ARGV[at + 5]
      local grave = redis.call('XADD', dead, '*', 'job', message, 'document', document)
      if id ~= '' then
        redis.call('HSET', jobs, id, 'X' .. grave)
        redis.call('SET', KEYS[n], document, 'PX', number)
        redis.call('PUBLISH', KEYS[n], document)
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
