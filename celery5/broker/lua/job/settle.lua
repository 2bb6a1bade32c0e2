-- Settle a batch of outcomes: result, state, next attempt or dead letter, and acknowledgement, in one step.
-- KEYS  1 stream of the lane that the outcomes' entries are on
--       2 where its jobs are
--       3 leases of its workers
--       4 scheduled jobs by time
--       5 their Commands
--       6 dead-letter queue
--       7 the live job of each key
--       8 which sinks take which documents; a sink's stream is named after it
--       9.. result key of each outcome, in order
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 channel that wakes workers
--       4 letter of the lane, '' for the normal one; the entries have it at their end
--       5.. six words for each outcome: verb, stream entry, job id, payload, how long the job's document is kept in ms, and terms.
--           By verb, the payload and the terms (of some a record of named fields, packed):
--           complete: document; what its key is remembered under or ''
--           retry:    Command; delay in ms
--           bury:     Command; {cause, document}
--           member:   result; the node of its run (`<run>~<node>`, and @ and the home of the run if it has those in its id). In
--                     place of the time: number in the map (-1: none; -2: the result is a run that takes its place)
--           ended:    document, or result of a success; {state, lock: what its key is remembered under}: of a member.
--                     The state RETURNED: the result is a run that takes its place
--           release:  Command; deliveries so far
--           hold:     Command; delay in ms: waits as it is, with the deliveries that it had
--           foreign:  Command; {delay in ms, list: of the foreign jobs that it is in (lib/foreign.lua)}
--           drop:     Command; deliveries and this one: takes the entry off the stream and touches nothing else; but if the
--                     job's place is this very entry, it is a release, or a hold without delay on the lane `handed`
--           and after all of them, for each document that sinks get: its stream entry, the names of the sinks, the
--           document, or '' for the outcome's own
-- Returns how many outcomes this worker still owned, or -1 when it has lost its lease: then nothing was done.
-- An entry that is not pending any more was settled before; it is left alone, so the call may be repeated. A job that
-- was revoked meanwhile (its place says V) is not tried again, given back or dead-lettered: it ends as REVOKED. An entry is
-- the job when it is where `jobs` has it; where `jobs` knows nothing of it, when it has not ended. Any other is a copy: it
-- ends nothing and does not come back. A copy that is given up is dead-lettered without the job's name.
-- What has ended of runs of workflows is noted on a list that is named after `jobs`, or in the outbox, for advance.lua. There, too, is
-- noted what is sent for a dead job that is in no run.
local stream, jobs, leases, due, waiting, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local unique, documents = KEYS[7], KEYS[8]
local group, me, lane = ARGV[1], ARGV[2], ARGV[4]
if not has_lease(leases, me) then return -1 end
local count = #KEYS - 8
local settled, ended, owned, earliest, has_documents = {}, {}, 0, nil, false
-- Only a waiting list gives jobs to the lane `handed`, each once, with a slot. Where all have one (settle_limited.lua says
-- so), what completes is the job: that saves a command.
local is_trusted = lane == 'g' and ARGV.all_have_slots
-- Where the jobs are, asked for all at once.
local ids, found = {}, {}
for n = 1, count do ids[n] = ARGV[6 * n + 1] end -- bound: the outcomes of this call, 256 at most
if count > 0 and not is_trusted then found = redis.call('HMGET', jobs, unpack(ids)) end
-- For each entry, where the words for its sinks begin.
local for_sinks = {}
for at = 5 + 6 * count, #ARGV, 3 do for_sinks[ARGV[at]] = at end -- bound: the documents of this call
-- The members of runs that have succeeded, by their nodes.
local nodes, members = {}, {}
-- Remember that a member has succeeded which an outbox has sent: it must not come again.
local function remember(id, result)
  if not string.find(id, '@', 1, true) then return end
  redis.call('SET', result, '{"v":1,"id":' .. cjson.encode(id) .. ',"task":"","state":"SUCCESS","reason":"ignored"}', 'PX', 600000)
end
local function note_member(id, result, value, number, node)
  remember(id, result)
  local noted = members[node]
  if not noted then
    noted = {{}, {}}
    nodes[#nodes + 1], members[node] = node, noted
  end
  noted[1][#noted[1] + 1], noted[2][#noted[2] + 1] = tonumber(number), value
end
-- Nearly all outcomes complete a job that is where `jobs` has it, so this entry is pending: these are acknowledged at once.
-- No function is made for them: that would cost as much as to settle a job.
local others, is_other = {}, {}
for n = 1, count do -- bound: the outcomes of this call
  local entry = ARGV[6 * n]
  local verb = ARGV[6 * n - 1]
  if found[n] == 'S' .. entry and (verb == 'complete' or verb == 'member') and not for_sinks[entry] then
    settled[#settled + 1] = lane == '' and entry or string.sub(entry, 1, -2)
  else
    others[#others + 1], is_other[n] = n, true
  end
end
if settled[1] then
  owned = redis.call('XACK', stream, group, unpack(settled))
  local seen = owned < #settled and {} -- an entry came twice in this call
  for n = 1, count do -- bound: the outcomes of this call
    local at, id, result = 6 * n, ids[n], KEYS[n + 8]
    if not is_other[n] and not (seen and seen[ARGV[at]]) then
      local document, lock = ARGV[at + 2], ARGV[at + 4]
      if ARGV[at - 1] == 'member' then
        note_member(id, result, document, ARGV[at + 3], lock)
      else
        redis.call('SET', result, document, 'PX', ARGV[at + 3])
        redis.call('PUBLISH', result, document)
        if lock ~= '' and redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
      end
      ended[#ended + 1] = id
      if seen then seen[ARGV[at]] = true end
    end
  end
end
if others[1] then
  -- libs
  -- Where the jobs are, by id, and kept up to date: two entries of one batch may have one id.
  local places = {}
  local function use_places()
    for n = 1, count do places[ids[n]] = found[n] end -- bound: the outcomes of this call
    for _, id in ipairs(ended) do places[id] = false end -- bound: as above
  end
  use_places()
  local function is_job(job)
    local place = places[job.id]
    if place then return string.sub(place, 2) == job.entry end
    return job.id ~= '' and redis.call('EXISTS', job.result) == 0
  end
  local function send_document(job, document)
    local at = for_sinks[job.entry]
    if not at then return end
    local sinks, own = ARGV[at + 1], ARGV[at + 2]
    has_documents = send_to_sinks(documents, sinks, own ~= '' and own or document) or has_documents
  end
  local function note_ended(job) places[job.id], ended[#ended + 1] = false, job.id end
  local function complete(job)
    if not is_trusted and not is_job(job) then return end
    store_document(job.result, job.payload, job.ttl)
    send_document(job, job.payload)
    note_ended(job)
    unlock(unique, job.terms, job.id)
  end
  local function complete_member(job)
    if not is_trusted and not is_job(job) then return end
    note_member(job.id, job.result, job.payload, job.ttl, job.terms)
    send_document(job, job.payload)
    note_ended(job)
  end
  local foreign = {} -- the jobs that are kept for other code, by their lists
  local has_failed = false -- a job is dead whose message says what is sent then
  -- The other verbs are rare. Their functions are made when the first of them comes.
  local function make_other_verbs()
    local verbs, clock = {}, now_ms()
    if is_trusted then
      found = redis.call('HMGET', jobs, unpack(ids))
      use_places()
    end
    local function move(id, place)
      places[id] = place
      redis.call('HSET', jobs, id, place)
    end
    local function end_as_revoked(job)
      local id, command = job.id, decode_message(job.payload)
      local task = as_text(command.task)
      local document = cjson.encode({v = 1, id = id, task = task, state = 'REVOKED', worker = me,
        finished = clock / 1000, attempt = as_whole(command.attempt, 1), replays = as_whole(command.replays, 0)})
      store_document(job.result, document, job.ttl)
      look_up_sinks(documents, 'REVOKED', task, document)
      note_end(jobs, id, 'REVOKED', document)
      note_ended(job)
      unlock(unique, lock_of(command), id)
    end
    local function is_revoked(id) return string.sub(places[id] or '', 1, 1) == 'V' end
    -- Return whether a job goes on: no copy does, and one that was revoked ends here. What has no id has only its entry.
    local function goes_on(job)
      if job.id == '' then return true end
      if not is_job(job) then return false end
      if not is_revoked(job.id) then return true end
      end_as_revoked(job)
      return false
    end
    -- The lane that a job comes back to when it is due: its own. One that was given to this worker has that of its priority.
    local function home_of(message)
      if lane ~= 'g' then return lane end
      return lane_of(decode_message(message))
    end
    -- How many workers died with the job so far: what is held keeps that.
    local function deliveries_of(entry)
      local on_stream = lane == '' and entry or string.sub(entry, 1, -2)
      local fields = fields_of(redis.call('XRANGE', stream, on_stream, on_stream)[1])
      return string.match(fields.deliveries or '', '^%d+$') or ''
    end
    local function keep_until_due(job, place, delay)
      local when = clock + tonumber(delay)
      keep_until(due, waiting, jobs, job.id, job.payload, place, when)
      places[job.id] = place
      if not earliest or when < earliest then earliest = when end
      return when
    end
    function verbs.retry(job)
      if goes_on(job) then keep_until_due(job, 'R' .. home_of(job.payload), job.terms) end
    end
    function verbs.hold(job)
      if goes_on(job) then keep_until_due(job, 'H' .. deliveries_of(job.entry) .. home_of(job.payload), job.terms) end
    end
    function verbs.foreign(job)
      if not goes_on(job) then return end
      local terms, home = cmsgpack.unpack(job.terms), home_of(job.payload)
      local when = keep_until_due(job, 'H' .. deliveries_of(job.entry) .. home, terms.delay)
      if not foreign[terms.list] then
        foreign[terms.list] = {wait = 0}
        foreign[#foreign + 1] = terms.list
      end
      local scored = foreign[terms.list]
      scored[#scored + 1] = {home, when, job.id}
      scored.wait = math.max(scored.wait, terms.delay)
    end
    function verbs.bury(job)
      local id, message, terms = job.id, job.payload, cmsgpack.unpack(job.terms)
      local here = is_job(job)
      if is_revoked(id) then
        if here then end_as_revoked(job) end
        return
      end
      local dead_entry = add_dead(dead, message, terms.document, terms.cause)
      if not here then return end
      local command = decode_message(message)
      move(id, 'X' .. dead_entry)
      store_document(job.result, terms.document, job.ttl)
      note_end(jobs, id, 'DEAD', terms.document)
      has_failed = note_failure(jobs, command, id, dead_entry, message, terms.document) or has_failed
      send_document(job, terms.document)
      unlock(unique, lock_of(command), id)
    end
    verbs['ended'] = function(job)
      if not is_job(job) then return end
      local id, result, document, terms = job.id, job.result, job.payload, cmsgpack.unpack(job.terms)
      if terms.state == 'RETURNED' then
        note_member(id, result, document, -2, id)
      else
        if terms.state == 'SUCCESS' then remember(id, result) else store_document(result, document, job.ttl) end
        note_end(jobs, id, terms.state, document)
      end
      send_document(job, document)
      note_ended(job)
      unlock(unique, terms.lock, id)
    end
    function verbs.release(job)
      -- Nobody reads what was given to a worker and comes back on that lane.
      if lane == 'g' then
        job.terms = 0
        return verbs.hold(job)
      end
      if not goes_on(job) then return end
      local again = redis.call('XADD', stream, '*', 'job', job.payload, 'deliveries', job.terms)
      if job.id ~= '' then move(job.id, 'S' .. again .. lane) end
    end
    function verbs.drop(job)
      if job.id == '' or not places[job.id] or not is_job(job) then return end
      if lane ~= 'g' then return verbs.release(job) end
      if goes_on(job) then keep_until_due(job, 'H' .. job.terms .. home_of(job.payload), 0) end
    end
    return verbs
  end
  local other_verbs
  for _, n in ipairs(others) do -- bound: the outcomes of this call
    local at = 6 * n
    local verb, entry = ARGV[at - 1], ARGV[at]
    local on_stream = lane == '' and entry or string.sub(entry, 1, -2)
    if redis.call('XACK', stream, group, on_stream) == 1 then
      owned, settled[#settled + 1] = owned + 1, on_stream
      local job = {entry = entry, id = ids[n], result = KEYS[n + 8], payload = ARGV[at + 2], ttl = ARGV[at + 3], terms = ARGV[at + 4]}
      if verb == 'complete' then
        complete(job)
      elseif verb == 'member' then
        complete_member(job)
      else
        other_verbs = other_verbs or make_other_verbs()
        other_verbs[verb](job)
      end
    end
  end
  wake_if_first(due, ARGV[3], earliest)
  if has_failed then redis.call('PUBLISH', ARGV[3], 'runs') end
  for _, list in ipairs(foreign) do -- bound: the outcomes of this call
    add_foreign(jobs, list, foreign[list], foreign[list].wait)
    redis.call('PUBLISH', ARGV[3], 'foreign ' .. list)
  end
end
for _, node in ipairs(nodes) do -- bound: the outcomes of this call
  local frame, home = string.match(node, '^([^@]*)@?(.*)$')
  local noted = members[node]
  local what = noted[1][1] >= 0 and {'members', frame, noted[1], noted[2]} or {noted[1][1] == -1 and 'one' or 'returned', frame, noted[2][1]}
  local record = cmsgpack.pack(what)
  if home == '' or home == string.match(jobs, '^[^{]*{[^:]*:(.*)}:jobs$') then
    redis.call('RPUSH', jobs .. ':ended', record)
  else
    redis.call('XADD', jobs .. ':to-send', '*', 'home', home, 'record', record)
  end
end
-- XDEL looks through a node of the stream for each entry. Where there are many, one XTRIM up to the first pending entry deletes
-- them: entries are read in order, so all before it have been read, and an entry that was read and is not pending is settled.
local deleted, first = 0, nil
if #settled >= 32 then first = redis.call('XPENDING', stream, group, '-', '+', 1)[1] end
if first then deleted = redis.call('XTRIM', stream, 'MINID', first[1]) end
if #settled > deleted then redis.call('XDEL', stream, unpack(settled)) end
if #ended > 0 then redis.call('HDEL', jobs, unpack(ended)) end
if has_documents then redis.call('PUBLISH', documents, '') end
return owned
