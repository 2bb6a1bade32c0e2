-- Put back the jobs of a dead worker. First its lease goes, so that it can settle nothing any more; then its jobs
-- move, with their delivery count, in portions; last the worker itself is forgotten. Safe to repeat.
-- KEYS  1 stream of the normal lane
--       2 where its jobs are
--       3 leases of its workers
--       4 dead-letter queue
--       5 prefix of the result keys (same slot; the jobs' ids are not known before)
--       6 the live job of each key
--       7 which sinks take which documents; a sink's stream is named after it
--       8 slots
--       9 how many are taken
--       10 prefix of the waiting lists
--       11.. streams of its other lanes: high, low, handed
-- ARGV  1 consumer group
--       2 name of the worker, or '' for the first whose lease has lapsed
--       3 deliveries after which a job counts as poisonous
--       4 how many jobs at most
--       5 ttl of a document in ms
--       6 '*' when all that it held is counted as having taken it down, '-' when only ARGV 15 and further are; '.' when it ended
--         in order: then it is not lost
--       7 channel that notifies workers of free slots
--       8 name of the worker that decided this from its heartbeat; '' for one that knows it without (its process ended)
--       9 the time of that heartbeat in ms, as renew_lease.lua returned it
--       10 lease of that worker in ms
--       11 bytes from which a message is not decoded: only its id is read
--       12 why it ended, for people; '' when nobody knows
--       13 what dead letters of this have in common: the pattern of their message, as groups of dead jobs have it
--       14 1 to take, with ARGV 2 '', one that holds jobs without a lease when none has lapsed: the cost grows with the workers
--       15.. stream entries that it had begun, each with the letter of its lane
-- Returns the worker's name ('' when there is none to recover), how many jobs were put back, how many were dead-lettered,
-- and 1 when there is more to do. Only a worker whose lease had lapsed at the time of the heartbeat is recovered. Nothing
-- is done for a worker whose own lease has lapsed since, or that names itself: this script may run long after it was sent,
-- when the server was frozen, and then all leases have lapsed. A job that was revoked while the worker had it (its place
-- begins with V) ends as REVOKED. A place with a different entry is that of another copy of the job, and stays as it is; a
-- copy of a job that was revoked or has ended is deleted. Beside the dead-letter queue stand `:deaths`, a hash of how many
-- workers died with jobs of each task, how many of its jobs were given up for it, and when it was last; and `:job:<id>`, a
-- list of the workers that a job took down; and for an hour `:lost`, a sorted set of the workers that were lost, by when in ms,
-- and `:lost-work`, a hash of what each had begun, and since when its loss is repaired: of two hundred workers at most.
local jobs, leases, dead, unique = KEYS[2], KEYS[3], KEYS[4], KEYS[6]
local streams = {[''] = KEYS[1], h = KEYS[11], l = KEYS[12], g = KEYS[13]}
local at, freed = use_keys {slots = KEYS[8], taken = KEYS[9], prefix = KEYS[10]}, {}
local group, name, judge = ARGV[1], ARGV[2], ARGV[8]
local now = now_ms()
local lapsed_by = now
if judge ~= '' then
  lapsed_by = math.min(tonumber(ARGV[9]), now)
  local until_then = tonumber(redis.call('ZSCORE', leases, judge) or 0)
  local named = name ~= '' and tonumber(redis.call('ZSCORE', leases, name) or 0)
  -- The judge's own lease is valid, so it never names itself.
  local refused = until_then <= now or ARGV[9] + ARGV[10] <= now or named and named > lapsed_by
  if refused then return {'', 0, 0, 0} end
end
-- A read that was under way while its worker was recovered may have been served later: jobs without a live worker.
local function stray()
  for _, stream in pairs(streams) do -- bound: the four lanes
    for _, consumer in ipairs(consumers_of(stream, group)) do -- bound: the workers of the queue
      if consumer.pending > 0 and not redis.call('ZSCORE', leases, consumer.name) then return consumer.name end
    end
  end
end
-- Of a message that is too large to be decoded only the id is read, where producers write it: at the beginning (`id_of` in
-- protocol/job/messages.py).
local function read_message(message)
  if #message >= tonumber(ARGV[11]) then
    local start = string.gsub(string.sub(message, 1, 1000), '^%s*{%s*"v"%s*:%s*%d+%s*,', '{')
    return {id = string.match(start, '^%s*{%s*"id"%s*:%s*"([^"\\]+)"')}
  end
  return decode_message(message)
end
-- End a job: store and announce its document, and free its key.
local function end_job(id, lock, document, state, task)
  store_document(KEYS[5] .. id, document, ARGV[5])
  note_end(jobs, id, state, document)
  look_up_sinks(KEYS[7], state, task, document)
  unlock(unique, lock, id)
end
local fence = -1
if name == '' then
  name = redis.call('ZRANGEBYSCORE', leases, '-inf', lapsed_by, 'LIMIT', 0, 1)[1]
  if not name then
    name, fence = ARGV[14] == '1' and stray(), -2
    if not name then return {'', 0, 0, 0} end
  end
end
-- A worker without a lease begins no job, so none of its entries has killed a worker; nor has an entry of a worker that
-- left in order, with a lease of 0. The calls that follow know both by the fence.
local lease = redis.call('ZSCORE', leases, name)
if lease == '-2' or lease == '0' then fence = -2 end
-- Without a lease it was recovered before, or has left.
local is_lost = lease and fence == -1 and ARGV[6] ~= '.'
redis.call('ZADD', leases, fence, name)
local back, dead_lettered, begun = 0, 0, {}
for n = 15, #ARGV do begun[ARGV[n]] = true end -- bound: the entries that one worker had begun
local function read_lost_work()
  local known = redis.call('HGET', dead .. ':lost-work', name)
  return known and cjson.decode(known)
end
-- Count by task that a worker was lost with its jobs, once however many of them it ran, and what was given up for it. The
-- tasks that an earlier portion of this worker has counted stand with what is noted of it.
local deaths, poisoned = {}, {}
local counted = (is_lost and read_lost_work() or {}).tasks or {}
local function count_death(task, is_poisoned)
  local named = task ~= '' and task or '(unknown)'
  if not counted[named] then
    deaths[named], counted[named] = 1, true
  end
  if is_poisoned then poisoned[named] = (poisoned[named] or 0) + 1 end
end
-- Add what was counted to the hash of it, which has some thousand fields at most.
local function write_deaths()
  if next(deaths) == nil and next(poisoned) == nil then return end
  local key = dead .. ':deaths'
  local is_full = redis.call('HLEN', key) >= 1000
  local function name_field(named)
    return is_full and redis.call('HEXISTS', key, 'deaths ' .. named) == 0 and '(others)' or named
  end
  for named in pairs(deaths) do -- bound: ARGV 4
    local field = name_field(named)
    redis.call('HINCRBY', key, 'deaths ' .. field, 1)
    redis.call('HSET', key, 'last ' .. field, string.format('%.0f', now))
  end
  for named, times in pairs(poisoned) do -- bound: ARGV 4
    redis.call('HINCRBY', key, 'poisoned ' .. name_field(named), times)
  end
  redis.call('PEXPIRE', key, 90 * 86400000)
end
-- Record that this worker, which took the job at the time `taken` in ms, died with it. The last twenty such deaths are kept.
local function record_death(id, taken)
  if id == '' then return end
  local key = dead .. ':job:' .. id
  local times = redis.call('RPUSH', key, cjson.encode({worker = name, at = now / 1000, why = ARGV[12], taken = taken / 1000}))
  if times > 20 then redis.call('LTRIM', key, -20, -1) end
  redis.call('PEXPIRE', key, string.format('%.0f', math.max(tonumber(ARGV[5]), 86400000)))
end
-- Return the workers that a job took down.
local function read_deaths(id)
  local found = {}
  for n, one in ipairs(id ~= '' and redis.call('LRANGE', dead .. ':job:' .. id, 0, -1) or {}) do -- bound: twenty
    found[n] = cjson.decode(one)
  end
  return found[1] and found or nil
end
-- Note what became of a job that the lost worker had begun.
local lost_jobs = {}
-- The first and the last dead letter that this portion makes.
local first_dead, last_dead
local function note_fate(id, task, fate)
  if #lost_jobs < 10 then lost_jobs[#lost_jobs + 1] = {id = id, task = task, fate = fate} end
end
-- Forget workers that were lost more than an hour ago, and those beyond two hundred.
local function forget_lost()
  local surplus = redis.call('ZCARD', dead .. ':lost') - 200
  local old = redis.call('ZRANGEBYSCORE', dead .. ':lost', '-inf', string.format('%.0f', now - 3600000), 'LIMIT', 0, 200)
  if surplus > #old then old = redis.call('ZRANGE', dead .. ':lost', 0, surplus - 1) end
  if old[1] then
    redis.call('ZREM', dead .. ':lost', unpack(old))
    redis.call('HDEL', dead .. ':lost-work', unpack(old))
  end
end
-- Return now if the loss is repaired already, since another worker of its name has joined; join.lua notes it of one that joins later.
local function read_repair()
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. string.format('%.0f', now), '+inf')) do -- bound: the workers of the queue
    if other ~= name and inbox_of(other) == inbox_of(name) then return now end
  end
end
-- Note that the worker was lost, and add to what is noted of it.
local function write_lost(put_back, dead_lettered)
  local known = read_lost_work()
  local work = known or {put_back = 0, dead = 0, why = ARGV[12], repaired_at = read_repair()}
  work.tasks = work.tasks or {}
  local size = 0
  for _ in pairs(work.tasks) do size = size + 1 end -- bound: a hundred
  for named in pairs(deaths) do -- bound: ARGV 4
    if size < 100 then work.tasks[named], size = true, size + 1 end
  end
  work.put_back, work.dead = work.put_back + put_back, work.dead + dead_lettered
  work.first_dead, work.last_dead = work.first_dead or first_dead, last_dead or work.last_dead
  if lost_jobs[1] then
    work.jobs = work.jobs or {}
    for _, job in ipairs(lost_jobs) do -- bound: ten
      if #work.jobs < 10 then work.jobs[#work.jobs + 1] = job end
    end
  end
  redis.call('HSET', dead .. ':lost-work', name, cjson.encode(work))
  if not known then
    redis.call('ZADD', dead .. ':lost', string.format('%.0f', now), name)
    forget_lost()
  end
  redis.call('PEXPIRE', dead .. ':lost', 3600000)
  redis.call('PEXPIRE', dead .. ':lost-work', 3600000)
end
-- Put back or dead-letter one entry of a lane's pending list.
local function undo(one, lane)
  local stream = streams[lane]
  local entry = redis.call('XRANGE', stream, one[1], one[1])[1]
  local fields = fields_of(entry)
  local command = read_message(fields.job or '')
  local id, task, lock = as_text(command.id), as_text(command.task), lock_of(command)
  local message = fields.job or ''
  if id ~= '' and task ~= '' then message = with_sent(message, one[1], command) end
  local blamed = fence == -1 and (ARGV[6] == '*' or begun[one[1] .. lane])
  local deliveries = as_whole(tonumber(fields.deliveries), 0) + (blamed and 1 or 0)
  local place = id ~= '' and redis.call('HGET', jobs, id) or ''
  local revoked, here = string.sub(place, 1, 1) == 'V', string.sub(place, 2) == one[1] .. lane
  local over = id ~= '' and place == '' and redis.call('EXISTS', KEYS[5] .. id) == 1
  local document = {v = 1, id = id, task = task, worker = name, finished = now / 1000, attempt = as_whole(command.attempt, 1),
    replays = as_whole(command.replays, 0)}
  if entry and blamed then
    count_death(task, not over and not revoked and deliveries > tonumber(ARGV[3]))
    record_death(id, now - one[3])
  end
  local fate = 'put back'
  if not entry or over or (revoked and not here) then -- there is nothing to run
    fate = 'had ended'
  elseif revoked then
    fate = 'revoked'
    document.state = 'REVOKED'
    redis.call('HDEL', jobs, id)
    end_job(id, lock, cjson.encode(document), 'REVOKED', task)
  elseif blamed and deliveries > tonumber(ARGV[3]) then
    document.state, document.reason = 'DEAD', 'poisoned'
    local text = 'took its worker down ' .. deliveries .. ' times'
    if ARGV[12] ~= '' then text = text .. '; at last: ' .. ARGV[12] end
    document.failure = {type = 'WorkerDied', message = text, worker = name}
    document.deliveries, document.deaths = deliveries, read_deaths(id)
    local words = cjson.encode(document)
    -- What the id of the group is made of: `parse_cause` of protocol/job/error_text.py reads it.
    local cause = task .. '\0' .. 'WorkerDied' .. '\0' .. ARGV[13]
    local dead_entry = add_dead(dead, message, words, cause)
    first_dead, last_dead = first_dead or dead_entry, dead_entry
    if id ~= '' and (here or place == '') then
      redis.call('HSET', jobs, id, 'X' .. dead_entry)
      end_job(id, lock, words, 'DEAD', task)
      note_failure(jobs, command, id, dead_entry, message, words)
    end
    dead_lettered = dead_lettered + 1
    fate = 'dead letter'
  else
    -- A job on the lane `handed` goes to the lane of its priority.
    if lane == 'g' then lane = lane_of(command) end
    local again = redis.call('XADD', streams[lane], '*', 'job', message, 'deliveries', deliveries)
    if id ~= '' and (here or place == '') then redis.call('HSET', jobs, id, 'S' .. again .. lane) end
    back = back + 1
  end
  if entry and blamed then note_fate(id, task, fate) end
end
-- Remove entries from a lane, and free their slots.
local function take_off(entries, lane)
  redis.call('XACK', streams[lane], group, unpack(entries))
  redis.call('XDEL', streams[lane], unpack(entries))
  local slots = {}
  for n, entry in ipairs(entries) do slots[n] = entry .. lane end -- bound: ARGV 4
  for _, limit in ipairs(free_slots(at, slots)) do -- bound: ARGV 4
    unpark(at, limit[1], limit[2])
    freed[limit[1]] = true
  end
end
local left = tonumber(ARGV[4])
for _, lane in ipairs({'h', '', 'l', 'g'}) do -- bound: the four lanes
  local pending, entries = left > 0 and redis.pcall('XPENDING', streams[lane], group, '-', '+', left, name) or {}, {}
  for n, one in ipairs(pending.err and {} or pending) do -- bound: ARGV 4
    undo(one, lane)
    entries[n] = one[1]
  end
  if entries[1] then take_off(entries, lane) end
  left = left - #entries
end
write_deaths()
if is_lost then write_lost(back, dead_lettered) end
write(at)
for task in pairs(freed) do redis.call('PUBLISH', ARGV[7], task) end -- bound: ARGV 4
if left == 0 then return {name, back, dead_lettered, 1} end
for _, stream in pairs(streams) do redis.pcall('XGROUP', 'DELCONSUMER', stream, group, name) end -- bound: the four lanes
remove_consumer(jobs .. ':to-send', group, name)
redis.call('ZREM', leases, name)
return {name, back, dead_lettered, 0}
