-- Revoke jobs. What waits ends here; what a worker has is marked, and its worker is told.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 scheduled jobs by time
--       4 their envelopes
--       5 the live job of each key
--       6 stream of its lane `high`
--       7 stream of its lane `low`
--       8 stream of its lane `handed`
--       9 which sinks take which documents; a sink's stream is named after it
--       10 how many jobs wait at gates
--       11 prefix of the waiting room
--       12.. result key of each job, in order
-- ARGV  1 consumer group
--       2 channel that tells the workers of the queue
--       3 ttl of a document in ms, unless the job says otherwise
--       4 the least ttl in ms
--       5.. each job's id
-- Gives for each job what was found: REVOKED (it will not run, and did not before this), EXECUTING (a worker has it and
-- is told), the state of one that had ended before, or UNKNOWN. The mark on a job that a worker has (its place says V)
-- lasts: it is never tried again, given back or recovered. Repeating the call gives the same again.
local jobs, due, waiting, unique = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local streams = {[''] = KEYS[1], h = KEYS[6], l = KEYS[7], g = KEYS[8]}
local at = keys_of_gates {due = due, held = KEYS[10], room = KEYS[11]}
local group = ARGV[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- What a message says may be anything: what fails in the middle of this script would take jobs with it.
local function text(value) return type(value) == 'string' and value or '' end
local function number(value, least) return type(value) == 'number' and value >= least and value < 1e12 and value or least end
local function unlock(lock, id)
  if redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
end
-- Without a message nobody knows the job's key, but what it holds is known. Not all keys are looked at: one that a job
-- holds which is not there any more is free for whoever asks for it (claim.lua).
local PAGES, pages, owners = 4, 0, nil
local function unlock_all(id)
  local cursor = not owners and '0'
  owners = owners or {}
  while cursor and pages < PAGES do -- bound: PAGES of 500 keys, once for all jobs
    local page = redis.call('HSCAN', unique, cursor, 'COUNT', 500)
    pages, cursor = pages + 1, page[1] ~= '0' and page[1]
    for n = 1, #page[2], 2 do -- bound: 500 keys
      local locks = owners[page[2][n + 1]] or {}
      locks[#locks + 1], owners[page[2][n + 1]] = page[2][n], locks
    end
  end
  for _, lock in ipairs(owners[id] or {}) do unlock(lock, id) end -- bound: as above
end
local function withdraw(id, message, result)
  local readable, envelope = pcall(cjson.decode, message or '')
  if not readable or type(envelope) ~= 'table' then envelope = {} end
  local task, key = text(envelope.task), text(envelope.key)
  local document = cjson.encode({v = 1, id = id, task = task, state = 'REVOKED', sent = number(envelope.sent, 0),
    attempt = math.floor(number(envelope.attempt, 1)), replays = math.floor(number(envelope.replays, 0)),
    finished = now / 1000})
  local own = number(envelope.results_ttl, 0)
  local ttl = math.max(own > 0 and own * 1000 or ARGV[3], ARGV[4])
  redis.call('SET', result, document, 'PX', string.format('%.0f', ttl))
  redis.call('PUBLISH', result, document)
  for sink in string.gmatch(redis.call('HGET', KEYS[9], 'REVOKED ' .. task) or '', '%S+') do -- bound: the sinks of one task
    redis.call('XADD', KEYS[9] .. ':' .. sink, '*', 'document', document)
    redis.call('PUBLISH', KEYS[9], '')
  end
  redis.call('HDEL', jobs, id)
  if not message then unlock_all(id) elseif key ~= '' then unlock(task .. ' ' .. key, id) end
  return 'REVOKED'
end
-- How a job ended that has no place any more.
local function ended(result)
  local readable, document = pcall(cjson.decode, redis.call('GET', result) or '')
  if not readable or type(document) ~= 'table' or type(document.state) ~= 'string' then return 'UNKNOWN' end
  return document.state
end
local found = {}
for n = 12, #KEYS do -- bound: the jobs of this call
  local id, result = ARGV[n - 7], KEYS[n]
  local place = redis.call('HGET', jobs, id) or ''
  local kind, where = string.sub(place, 1, 1), string.sub(place, 2)
  if kind == 'D' or kind == 'R' or kind == 'H' then
    found[#found + 1] = withdraw(id, redis.call('HGET', waiting, id), result)
    redis.call('ZREM', due, id)
    redis.call('HDEL', waiting, id)
  elseif kind == 'G' then
    found[#found + 1] = withdraw(id, redis.call('HGET', waiting, id), result)
    step_out(at, id, string.match(where, '^%d* (.*)$'))
    keep(at, id)
    redis.call('HDEL', waiting, id)
  elseif kind == 'S' or kind == 'V' then
    local entry, lane = string.match(where, '^([%d-]*)(%a?)')
    local stream = streams[lane] or streams['']
    local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1)
    if not pending.err and pending[1] then
      redis.call('HSET', jobs, id, 'V' .. where)
      redis.call('PUBLISH', ARGV[2], where)
      found[#found + 1] = 'EXECUTING'
    else
      local message
      local there = redis.pcall('XRANGE', stream, entry, entry)[1]
      for at = 1, there and #there[2] or 0, 2 do -- bound: the fields of an entry, as its sender wrote them
        if there[2][at] == 'job' then message = there[2][at + 1] end
      end
      found[#found + 1] = withdraw(id, message, result)
      redis.pcall('XDEL', stream, entry)
    end
  elseif kind == 'X' then
    found[#found + 1] = 'DEAD'
  else
    found[#found + 1] = ended(result)
  end
end
write(at)
return found
