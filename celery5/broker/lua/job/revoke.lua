-- Revoke jobs. A job that waits ends now; one that a worker has is marked, and its worker is notified.
-- KEYS  1 stream of the queue
--       2 where its jobs are; the lists of foreign jobs are named after it (lib/foreign.lua)
--       3 scheduled jobs by time
--       4 their Commands
--       5 the live job of each key
--       6 stream of its lane `high`
--       7 stream of its lane `low`
--       8 stream of its lane `handed`
--       9 which sinks take which documents; a sink's stream is named after it
--       10 how many jobs wait at limits
--       11 prefix of the waiting lists
--       12 when the jobs were revoked that waited, for searches
--       13 their documents
--       14.. result key of each job, in order
-- ARGV  1 consumer group
--       2 channel that notifies the workers of the queue
--       3 ttl of a document in ms, unless the job says otherwise
--       4 the least ttl in ms
--       5 how many jobs keys 12 and 13 keep
--       6 their ttl in ms, and that of each job
--       7 channel that wakes workers
--       8.. each job's id
-- Returns for each job: REVOKED (it will not run, and was not running), EXECUTING (a worker has it and
-- is notified), the state of one that had ended before, or UNKNOWN. The mark on a job that a worker has (its place says V)
-- lasts: it is never tried again, given back or recovered. Repeating the call returns the same again.
local jobs, due, waiting, unique = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local streams = {[''] = KEYS[1], h = KEYS[6], l = KEYS[7], g = KEYS[8]}
local at = use_keys {due = due, held = KEYS[10], prefix = KEYS[11]}
local group, revoked, documents, has_kept = ARGV[1], KEYS[12], KEYS[13], false
local now = now_ms()
local function as_number(value, least) return type(value) == 'number' and value >= least and value < 1e12 and value or least end
-- Without its message the key of a job is not known, so the keys are searched for its id. Not all keys are searched: a key
-- of a job that does not exist any more is free for the next job anyway (publish_unique.lua).
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
  for _, lock in ipairs(owners[id] or {}) do unlock(unique, lock, id) end -- bound: as above
end
local function withdraw(id, message, result, entry)
  local command = decode_message(message)
  local task = as_text(command.task)
  local sent = tonumber(entry and sent_by_entry(command, entry)) or as_number(command.sent, 0)
  local document = cjson.encode({v = 1, id = id, task = task, state = 'REVOKED', sent = sent,
    attempt = as_whole(command.attempt, 1), replays = as_whole(command.replays, 0),
    finished = now / 1000})
  local own = as_number(command.results_ttl, 0)
  local ttl = math.max(own > 0 and own * 1000 or ARGV[3], ARGV[4])
  store_document(result, document, string.format('%.0f', ttl))
  note_end(jobs, id, 'REVOKED', document)
  redis.call('ZADD', revoked, now, id)
  redis.call('HSET', documents, id, document)
  has_kept = true
  look_up_sinks(KEYS[9], 'REVOKED', task, document)
  redis.call('HDEL', jobs, id)
  if message then unlock(unique, lock_of(command), id) else unlock_all(id) end
  return 'REVOKED'
end
-- Return the final state of a job without a place.
local function ended(result)
  local document = decode_message(redis.call('GET', result))
  return type(document.state) == 'string' and document.state or 'UNKNOWN'
end
local found, held = {}, {}
for n = 14, #KEYS do -- bound: the jobs of this call
  local id, result = ARGV[n - 6], KEYS[n]
  local place = redis.call('HGET', jobs, id) or ''
  local kind, where = string.sub(place, 1, 1), string.sub(place, 2)
  if kind == 'D' or kind == 'R' or kind == 'H' then
    found[#found + 1] = withdraw(id, redis.call('HGET', waiting, id), result)
    redis.call('ZREM', due, id)
    redis.call('HDEL', waiting, id)
    if kind == 'H' then held[#held + 1] = id end
  elseif kind == 'G' then
    found[#found + 1] = withdraw(id, redis.call('HGET', waiting, id), result)
    leave_list(at, id, string.match(where, '^%d* (.*)$'))
    expires_no_more(at, id)
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
      found[#found + 1] = withdraw(id, fields_of(redis.pcall('XRANGE', stream, entry, entry)[1]).job, result, entry)
      redis.pcall('XDEL', stream, entry)
    end
  elseif kind == 'X' then
    found[#found + 1] = 'DEAD'
  else
    found[#found + 1] = ended(result)
  end
end
write(at)
leave_foreign(jobs, held)
if has_kept then
  local MOST = 400 -- twice as many as a call adds
  local over = math.min(redis.call('ZCARD', revoked) - ARGV[5], MOST)
  local gone = redis.call('ZRANGEBYSCORE', revoked, '-inf', now - ARGV[6], 'LIMIT', 0, MOST)
  if over > #gone then gone = redis.call('ZRANGE', revoked, 0, over - 1) end
  if gone[1] then
    redis.call('ZREM', revoked, unpack(gone))
    redis.call('HDEL', documents, unpack(gone))
  end
  redis.call('PEXPIRE', revoked, ARGV[6])
  redis.call('PEXPIRE', documents, ARGV[6])
end
notify_of_ends(ARGV[7])
return found
