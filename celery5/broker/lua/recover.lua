-- Put back what a dead worker held. First its lease goes, so that it can settle nothing any more (I4); then its jobs
-- move, with their delivery count, in portions; last the worker itself is forgotten. Safe to repeat.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 leases of its workers
--       4 dead-letter queue
--       5 prefix of the result keys (same slot; the jobs' ids are not known before)
--       6 the live job of each key
-- ARGV  1 consumer group
--       2 name of the worker, or '' for the first whose lease has lapsed or who holds jobs without one
--       3 deliveries after which a job counts as poisonous (I5)
--       4 how many jobs at most
--       5 ttl of a document in ms
--       6 '*' when all that it held is counted as having taken it down, '-' when only these are:
--       7.. stream entries that it had begun
-- Gives the worker's name ('' when there is none to recover), how many jobs were put back, how many were buried, and
-- 1 when there is more to do. A job that was revoked while the worker had it (its place says V) ends as REVOKED.
local stream, jobs, leases, dead, unique = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[6]
local group, name = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A read that was under way while its worker was recovered may have been served later: jobs of nobody.
local function stray()
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    local field = {}
    for n = 1, #consumer, 2 do field[consumer[n]] = consumer[n + 1] end
    if field.pending > 0 and not redis.call('ZSCORE', leases, field.name) then return field.name end
  end
end
-- The job has ended: its document is kept and announced, its key is free.
local function tell(envelope, id, document)
  redis.call('SET', KEYS[5] .. id, document, 'PX', ARGV[5])
  redis.call('PUBLISH', KEYS[5] .. id, document)
  if type(envelope.key) == 'string' and envelope.key ~= '' then
    local lock = envelope.task .. ' ' .. envelope.key
    if redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
  end
end
local fence = -1
if name == '' then
  name = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
  if not name then
    name, fence = stray(), -2
    if not name then return {'', 0, 0, 0} end
  end
end
-- Who has no lease begins no job, so what it was given all the same has taken nobody down.
if redis.call('ZSCORE', leases, name) == '-2' then fence = -2 end
redis.call('ZADD', leases, fence, name)
local pending = redis.pcall('XPENDING', stream, group, '-', '+', ARGV[4], name)
if pending.err then
  redis.call('ZREM', leases, name)
  return {name, 0, 0, 0}
end
local back, buried, begun = 0, 0, {}
for n = 7, #ARGV do begun[ARGV[n]] = true end
for _, one in ipairs(pending) do
  local entry = redis.call('XRANGE', stream, one[1], one[1])[1]
  redis.call('XACK', stream, group, one[1])
  if entry then
    local field = {}
    for n = 1, #entry[2], 2 do field[entry[2][n]] = entry[2][n + 1] end
    redis.call('XDEL', stream, one[1])
    local readable, envelope = pcall(cjson.decode, field.job or '')
    if not readable or type(envelope) ~= 'table' then envelope = {} end
    local id = type(envelope.id) == 'string' and envelope.id or ''
    local task = type(envelope.task) == 'string' and envelope.task or ''
    local attempt = type(envelope.attempt) == 'number' and envelope.attempt or 1
    local blamed = fence == -1 and (ARGV[6] == '*' or begun[one[1]])
    local deliveries = (tonumber(field.deliveries) or 0) + (blamed and 1 or 0)
    local place = id ~= '' and redis.call('HGET', jobs, id) or ''
    local document = {v = 1, id = id, task = task, worker = name, finished = now / 1000, attempt = attempt}
    if string.sub(place, 1, 1) == 'V' then
      document.state = 'REVOKED'
      redis.call('HDEL', jobs, id)
      tell(envelope, id, cjson.encode(document))
    elseif blamed and deliveries > tonumber(ARGV[3]) then
      document.state, document.reason = 'DEAD', 'poisoned'
      document.failure = {type = 'WorkerDied', message = 'took its worker down ' .. deliveries .. ' times', worker = name}
      local text = cjson.encode(document)
      local grave = redis.call('XADD', dead, '*', 'job', field.job or '', 'document', text)
      if id ~= '' then
        redis.call('HSET', jobs, id, 'X' .. grave)
        tell(envelope, id, text)
      end
      buried = buried + 1
    else
      local again = redis.call('XADD', stream, '*', 'job', field.job or '', 'deliveries', deliveries)
      if id ~= '' then redis.call('HSET', jobs, id, 'S' .. again) end
      back = back + 1
    end
  end
end
if #pending < tonumber(ARGV[4]) then
  redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
  redis.call('ZREM', leases, name)
  return {name, back, buried, 0}
end
return {name, back, buried, 1}
