-- Move runs of workflows on: apply records of what has happened, and send the jobs that may run now.
-- KEYS  1 records of what has ended and is not counted yet
--       2 prefix of the keys of runs
--       3 prefix of definitions
--       4 outbox
--       5 live runs, by when to look at them
--       6 runs that have ended lately
--       7 where the queue's jobs are
--       8 prefix of result keys
--       9 stream of the normal lane
--       10 stream of its lane `high`
--       11 stream of its lane `low`
--       12 idle runs: lib/idle_runs.lua
--       13 runs that stop, are being undone, or have an undo job that is dead
-- ARGV  1 steps at most: a job that is sent is a step
--       2 channel that wakes workers
--       3 name of the queue
--       4 ttl in ms of a run that has ended
--       5 '1' when the caller is a worker: then it does what is left; else workers are notified of that
--       6.. records that are applied first, packed
-- Returns how many records are left, how many entries the outbox has, a reply for each record of ARGV, the error of a
-- record that could not be applied ('' for none), and the runs that have failed or expired: id, workflow, state, and what failed first.
-- A run lives in the slot of one queue, its home, and only this script changes it. States: protocol/workflows/status.py.
-- A record may come twice: a node ends once, by its state; a member of a map once, by its bit.
-- What this call is about: its keys, its words, what it has read and what it has still to write. The libraries take it, and add their
-- functions to it.
local call = {ended = KEYS[1], prefix = KEYS[2], definitions = KEYS[3], outbox = KEYS[4], due = KEYS[5], past = KEYS[6], jobs = KEYS[7],
  result_prefix = KEYS[8], idle = KEYS[12], undoing = KEYS[13], streams = {[''] = KEYS[9], h = KEYS[10], l = KEYS[11]},
  budget = tonumber(ARGV[1]), wake = ARGV[2], home = ARGV[3], ttl = ARGV[4], now = now_ms(),
  runs = {}, order = {}, nodes = {}, places = {}, failed_runs = {}, earliest = nil}
local PAGE = 200 -- keys or nodes that one step looks at, where they are many
add_runs(call)
add_run_messages(call)
add_run_undo(call)
add_run_failures(call)
add_run_ends(call)
add_run_nodes(call)
add_run_maps(call)
add_run_children(call)
add_run_steps(call)
add_run_outcomes(call)
local run_of, get, definitions, prefix, add_run, put = call.run_of, call.get, call.definitions, call.prefix, call.add_run, call.put
local LIVE, now, keep_definition, add, head_of, watch = call.LIVE, call.now, call.keep_definition, call.add, call.head_of, call.watch
local look_at, later, work_on, parse, end_single = call.look_at, call.later, call.work_on, call.parse, call.end_single
local fail_member, end_members, go_on_failing, record_later = call.fail_member, call.end_members, call.go_on_failing, call.record_later
local state_of, refill, node_of, is_undoing, SUCCESS = call.state_of, call.refill, call.node_of, call.is_undoing, call.SUCCESS
local send_undo, due, failures, to_outbox, number = call.send_undo, call.due, call.failures, call.to_outbox, call.number
local fail_run, EXPIRED, wake_no_more, succeed, fail_node = call.fail_run, call.EXPIRED, call.wake_no_more, call.succeed, call.fail_node
local member_id, CANCELLED, is_counted, begin_map = call.member_id, call.CANCELLED, call.is_counted, call.begin_map
local may_begin, set_state, begin_child, ttl, has_ended = call.may_begin, call.set_state, call.begin_child, call.ttl, call.has_ended
local BUCKET, is_on_failure, feed_all, child_to_retry = call.BUCKET, call.is_on_failure, call.feed_all, call.child_to_retry
local root_of, life_of, result_prefix, past, end_run = call.root_of, call.life_of, call.result_prefix, call.past, call.end_run
local FAILED, ended, write_runs, wake, outbox = call.FAILED, call.ended, call.write_runs, call.wake, call.outbox
local failed_runs = call.failed_runs
local handlers = {}
-- Start a run that has `life` ms, of a plan of `size` nodes, unless there is one of its id. `totals` has each map, and how many items of
-- it were published. Returns 1 when it is new, also when the call comes again; -1 when something of it is not there any more.
function handlers.start(id, life, size, fields, roots, totals, waits)
  local known = run_of(id)
  if known then return fields.caller and get(known, 'caller') == fields.caller and 1 or 0 end
  if redis.call('HLEN', definitions .. fields.def) ~= size + 1 then return -1 end
  for _, map in ipairs(totals) do -- bound: the maps of a plan, 500 at most
    if redis.call('LLEN', prefix .. id .. ':' .. map[1] .. ':items') ~= map[2] then return -1 end
  end
  if fields.args then -- those of a long list are beside the run
    if redis.call('HLEN', prefix .. id .. ':args') ~= fields.args then return -1 end
    redis.call('PERSIST', prefix .. id .. ':args')
  end
  local run = add_run(id, 'new', {})
  for name, value in pairs(fields) do put(run, name, value) end -- bound: the header of a run and its arguments
  put(run, 'state', LIVE)
  put(run, 'created', now)
  put(run, 'until', now + life)
  keep_definition(run)
  if fields.root then
    put(run, 'all', 0)
    add(run, 'all', head_of(run).all)
  end
  for _, map in ipairs(totals) do -- bound: as above
    put(run, 'total:' .. map[1], map[2])
    redis.call('PERSIST', run.key .. ':' .. map[1] .. ':items')
    add(run, 'all', map[2])
  end
  for _, n in ipairs(waits or {}) do watch(run, n) end -- bound: the waits of a plan, 100 at most
  look_at(run)
  for n = #roots, 1, -1 do later(run, 'begin', roots[n]) end -- bound: the roots of a plan, 500 at most
  work_on(run)
  return 1
end
function handlers.one(frame, value)
  local id, n, generation = parse(frame)
  local run = id and run_of(id)
  if not run then return end
  end_single(run, n, generation, 'SUCCESS', value)
  work_on(run)
end
handlers['end'] = function(member_id_, state, document)
  local id, n, generation, member = parse(member_id_)
  local run = id and run_of(id)
  if not run then return end
  if member then fail_member(run, n, generation, member, state, document) else end_single(run, n, generation, state, document) end
  work_on(run)
end
function handlers.members(frame, members, values)
  local id, n, generation = parse(frame)
  local run = id and run_of(id)
  if not run then return end
  end_members(run, n, generation, members, values)
  work_on(run)
end
-- A child has ended: the node in whose place it is ends with it.
function handlers.sub(frame, state, outcome)
  if state == 'SUCCESS' then return handlers.one(frame, outcome) end
  return handlers['end'](frame, state, outcome)
end
-- A child that had succeeded is undone now, because its parent fails.
function handlers.child_undone(frame)
  local id, n = parse(frame)
  local run = id and run_of(id)
  if not run or not get(run, 'undoing:' .. n) then return end
  put(run, 'undoing:' .. n, false)
  add(run, 'active', -1)
  go_on_failing(run)
end
-- Cancel the children of a run that has stopped, from a position on.
function handlers.stop(id, from)
  local children = redis.call('LRANGE', prefix .. id .. ':children', from, from + PAGE - 1)
  for _, child in ipairs(children) do handlers.cancel(child) end -- bound: PAGE
  call.budget = call.budget - #children / 4
  if #children == PAGE then record_later('stop', id, from + PAGE) end
end
-- Go on sending members of a map.
function handlers.fill(id, n)
  local run = run_of(id)
  if not run then return end
  put(run, 'filling:' .. n, false)
  local node_state, generation = state_of(run, n)
  if node_state == 'active' then refill(run, n, node_of(run, n), generation) end
end
function handlers.move(id)
  local run = run_of(id)
  if not run then return end
  local state = get(run, 'state')
  if is_undoing(run) then return go_on_failing(run) end
  if state == LIVE then work_on(run) elseif state ~= SUCCESS then send_undo(run) end
end
function handlers.due(id)
  local run = run_of(id)
  if not run then return redis.call('ZREM', due, id) end
  if is_undoing(run) then
    look_at(run)
    failures().note_undoing(run)
    return to_outbox('find-lost', run.id)
  end
  if get(run, 'state') ~= LIVE then return end
  if now >= number(run, 'until') then return fail_run(run, EXPIRED) end
  for _, one in ipairs(get(run, 'wakes') and cmsgpack.unpack(run.fields.wakes) or {}) do -- bound: the nodes that wait at once, 1000 at most
    local n = one[2]
    if one[1] <= now then wake_no_more(run, n) end
    if one[1] <= now and state_of(run, n) == 'waiting' then
      local node = node_of(run, n)
      if node and node.k == 'sleep' then
        succeed(run, n, node, 0, 'null')
      elseif node then
        fail_node(run, n, node, 0, 'EXPIRED', cjson.encode({v = 1, id = member_id(run, n, 0), task = '', state = 'EXPIRED',
          failure = {type = 'WaitTimedOut', message = 'no ' .. node.name .. ' came in time'}}))
      end
    end
  end
  if get(run, 'state') == LIVE then look_at(run) end
  work_on(run)
end
-- End jobs of a run that stops, which Redis has lost. A job is lost when it was missing in the call before, too, `least` ms ago or more. One
-- that was missing only once may have ended, and its record was on the way.
function handlers.lost(id, ids, least)
  local run = run_of(id)
  if not run or not is_undoing(run) or not ids[1] and not get(run, 'missing') then return end
  local before = get(run, 'missing') and cmsgpack.unpack(run.fields.missing) or {at = 0, ids = {}}
  if now - before.at < least then return end
  put(run, 'missing', cmsgpack.pack({at = now, ids = ids}))
  local known = {}
  for _, job in ipairs(before.ids) do known[job] = true end -- bound: 1000
  for _, job in ipairs(ids) do -- bound: as above
    if known[job] then handlers['end'](job, 'LOST', '') end
  end
end
-- Cancel a run. Returns its state.
function handlers.cancel(id)
  local run = run_of(id)
  if not run then return '' end
  fail_run(run, CANCELLED)
  return get(run, 'state')
end
-- Cancel a run for a call that has a token. Returns whether that call has cancelled it, also when it comes again.
function handlers.cancel_once(id, token)
  local run = run_of(id)
  if not run then return 0 end
  if get(run, 'state') == LIVE then
    put(run, 'cancelled_by', token)
    fail_run(run, CANCELLED)
  end
  return get(run, 'cancelled_by') == token and 1 or 0
end
-- Give a value to a node that waits for it, or keep it. Returns whether the run takes it, or has taken it when it came before.
function handlers.signal(id, name, value, signal_id)
  local run = run_of(id)
  if not run then return 0 end
  local known = get(run, 'seen:' .. name)
  known = known and cmsgpack.unpack(known) or {}
  for _, one in ipairs(known) do -- bound: 100
    if one == signal_id then return 1 end
  end
  if get(run, 'state') ~= LIVE then return 0 end
  local kept = get(run, 'kept:' .. name)
  kept = kept and cmsgpack.unpack(kept) or {}
  if #kept >= 100 then return -1 end
  known[#known + 1] = signal_id
  if #known > 100 then table.remove(known, 1) end
  put(run, 'seen:' .. name, cmsgpack.pack(known))
  local waiting = get(run, 'waiting:' .. name)
  waiting = waiting and cmsgpack.unpack(waiting) or {}
  while waiting[1] do -- bound: the nodes that wait for one name
    local n = table.remove(waiting, 1)
    put(run, 'waiting:' .. name, waiting[1] and cmsgpack.pack(waiting) or false)
    if state_of(run, n) == 'waiting' then
      wake_no_more(run, n)
      succeed(run, n, node_of(run, n), 0, value)
      work_on(run)
      if get(run, 'state') == LIVE then look_at(run) end
      return 1
    end
  end
  kept[#kept + 1] = value
  put(run, 'kept:' .. name, cmsgpack.pack(kept))
  return 1
end
-- Begin a map whose items a job has published. Returns false when they are lost.
local function begin_items(run, n, node, generation, total)
  if redis.call('LLEN', run.key .. ':' .. n .. ':items') ~= total then return false end
  redis.call('PERSIST', run.key .. ':' .. n .. ':items')
  add(run, 'active', -1)
  add(run, 'all', total - (is_counted(run, n, node) and 1 or 0))
  put(run, 'total:' .. n, total)
  begin_map(run, n, node, generation)
  return true
end
-- Take what a job has returned in place of a value: a workflow, which becomes its child, or the items of a map. The job is settled now, so
-- it is live now.
function handlers.returned(frame, packed)
  local id, n, generation = parse(frame)
  local run = id and run_of(id)
  local node = run and node_of(run, n)
  if not node then return end
  local node_state, current = state_of(run, n)
  local is_map = node.k == 'map'
  if current ~= generation or get(run, (is_map and 'total:' or 'run:') .. n) then return end
  local is_held = node_state == 'held'
  if not may_begin(run) or not is_held and node_state ~= 'active' then
    end_single(run, n, generation, 'REVOKED', '')
    return work_on(run)
  end
  if is_held then
    add(run, 'held', -1)
    add(run, 'active', 1)
    set_state(run, n, 'active', generation)
  end
  local record = cmsgpack.unpack(packed)
  local is_begun
  if is_map then is_begun = begin_items(run, n, node, generation, record[2]) else is_begun = begin_child(run, n, record, frame, handlers.start) ~= -1 end
  if not is_begun then
    end_single(run, n, generation, 'DEAD', cjson.encode({v = 1, id = frame, task = node.task or '', state = 'DEAD',
      failure = {type = 'ResultLost', message = 'what the job has returned was lost before it began'}}))
  end
  work_on(run)
end
-- Have the keys of a run expire, or stay, from a position on: there may be many.
function handlers.keep(id, stays, from)
  local run, key, position, last = run_of(id), prefix .. id, 0, from + PAGE
  local function visit(name)
    if position >= from and position < last then
      if stays then redis.call('PERSIST', key .. name) else redis.call('PEXPIRE', key .. name, ttl) end
    end
    position = position + 1
  end
  if run and not stays and not has_ended(run) then return end -- a child that is being stopped: at its end
  if run then run.expires = not stays end -- where it is written only at the end of this call
  visit('')
  visit(':undo')
  visit(':args')
  visit(':children')
  for _, n in ipairs(run and head_of(run).maps or {}) do -- bound: the maps of a plan, 500 at most
    for _, name in ipairs({':items', ':done', ':bad', ':held', ':again'}) do visit(':' .. n .. name) end -- bound: five
    local buckets, base = math.ceil(number(run, 'total:' .. n) / BUCKET), position
    for bucket = math.max(0, from - base), math.min(buckets, last - base) - 1 do -- bound: PAGE
      position = base + bucket
      visit(':' .. n .. ':r' .. bucket)
    end
    position = base + buckets
    if position >= last then break end
  end
  for _, child in ipairs(position < last and redis.call('LRANGE', key .. ':children', math.max(0, from - position), last - position - 1) or {}) do -- bound: PAGE
    record_later('keep', child, stays, 0)
  end
  position = position + redis.call('LLEN', key .. ':children')
  call.budget = call.budget - PAGE / 8
  if position >= last then record_later('keep', id, stays, last) end
end
-- Reset a node for a retry: what failed, was skipped or waited begins again. What succeeded too late is counted now.
local function reset(run, n, node)
  local node_state, generation = state_of(run, n)
  if is_on_failure(node) then return end
  if not node_state or node_state == 'done' or node_state == 'again' or node_state == 'cut' then return end
  if node_state == 'ending' then return set_state(run, n, 'cut', generation) end -- a map that has lost in a `first`
  if node_state == 'late' then
    set_state(run, n, 'done', generation)
    return feed_all(run, node, false)
  end
  if node_state == 'counted' or node_state == 'skipped' then
    for _, after in ipairs(node.f or {}) do -- bound: the feeds of a node, 100 at most
      add(run, 'left:' .. after, get(run, 'left:' .. after) and 1 or 0)
      add(run, 'bad:' .. after, -1)
    end
  end
  if is_counted(run, n, node) then
    if node_state == 'skipped' then add(run, 'skipped', -1) elseif node_state == 'counted' or node_state == 'failed' then add(run, 'bad', -1) end
  end
  if node_state == 'held' then add(run, 'held', -1) end
  if node.dynamic and not child_to_retry(run, n, node) then put(run, 'run:' .. n, false) end
  set_state(run, n, 'again', generation + 1)
  if node.k == 'map' and node_state ~= 'skipped' then
    local key = run.key .. ':' .. n
    for _, name in ipairs({'bad', 'held'}) do redis.call('BITOP', 'OR', key .. ':again', key .. ':again', key .. ':' .. name) end -- bound: two
    redis.call('DEL', key .. ':bad', key .. ':held')
    if not get(run, 'total:' .. n) then redis.call('DEL', key .. ':items') end -- those that its job may have published in part
    local again = number(run, 'failed:' .. n) + number(run, 'held:' .. n)
    add(run, 'again:' .. n, again)
    add(run, 'bad', -number(run, 'failed:' .. n))
    add(run, 'held', -number(run, 'held:' .. n))
    put(run, 'failed:' .. n, 0)
    put(run, 'held:' .. n, 0)
    put(run, 'error:' .. n, false)
    put(run, 'errors:' .. n, false)
  end
  if node_state ~= 'skipped' and node.k ~= 'end' and not (node.k == 'gate' and number(run, 'left:' .. n) > 0) then later(run, 'begin', n) end
end
-- Start what has failed in a run again, PAGE nodes from `from` on. Returns the node to go on from, 0 when the run is live again,
-- -1 when it has not failed, -2 when its jobs have not all ended, -3 when it was undone, -4 when it is not known, -5 when it is a child,
-- which is retried with its parent.
function handlers.retry(id, from, by_parent)
  local run = run_of(id)
  if not run then return -4 end
  if run.fields.root then
    if not by_parent then return -5 end
    local parent = run_of((parse(run.fields.parent)))
    if not parent or not may_begin(parent) then return record_later('sub', run.fields.parent, 'REVOKED', '') end
  end
  local state = get(run, 'state')
  if state == LIVE or state == SUCCESS then return -1 end
  if is_undoing(run) or number(run, 'active') > 0 then return -2 end
  if get(run, 'undone') then return -3 end
  local size = redis.call('HLEN', definitions .. run.fields.def) - 1
  if size < 1 then return -4 end
  if from == 0 and not by_parent then record_later('keep', run.id, true, 0) end -- that of the parent keeps the children, too
  for n = from, math.min(from + PAGE, size) - 1 do -- bound: PAGE
    local node = node_of(run, n)
    if node then reset(run, n, node) end
  end
  if from + PAGE < size then
    if by_parent then record_later('retry', id, from + PAGE, true) end
    return from + PAGE
  end
  put(run, 'state', LIVE)
  for _, name in ipairs({'error', 'errors', 'failed_at'}) do put(run, name, false) end -- bound: three
  add(run, 'retries', 1)
  local root = root_of(run)
  put(run, 'life', life_of(run))
  put(run, 'until', root and number(root, 'until') or now + run.fields.life)
  if root then
    add(root, 'skipped', -number(run, 'never_begun'))
    put(run, 'never_begun', 0)
  end
  keep_definition(run)
  redis.call('DEL', result_prefix .. id)
  redis.call('ZREM', past, id)
  redis.call('PERSIST', run.key)
  to_outbox('retried', run.id) -- the dead letters of what runs again may be in other slots
  look_at(run)
  work_on(run)
  return 0
end
-- `retry` for a call that has a token. When it comes again, a run that it has retried is not retried once more; one that has failed since
-- is, when a person asks again (`is_repeated`).
function handlers.retry_once(id, from, token, is_repeated)
  local run = run_of(id)
  local is_ours = run and get(run, 'retried_by') == token
  if is_ours and (not is_repeated or get(run, 'state') == LIVE or get(run, 'state') == SUCCESS) then return 0 end
  local reply = handlers.retry(id, from)
  if reply == 0 then put(run, 'retried_by', token) end
  return reply
end
-- Return whether Redis refuses to write. It does so before the first write of a script or not at all.
local function is_refusal(why)
  for _, code in ipairs({'OOM ', 'MISCONF ', 'READONLY ', 'NOREPLICAS '}) do -- bound: four
    if string.find(why, code, 1, true) then return true end
  end
  return false
end
-- Apply a record. One that raises an error ends its run: nobody knows what is true of it any more. Where Redis refuses to write, nothing
-- has changed, and the whole call fails: it is made again.
local problem = ''
local function apply(record)
  local handler = handlers[record[1]]
  if not handler then return 0 end
  local done, reply = pcall(handler, unpack(record, 2))
  if done then return reply or 0 end
  local why = tostring(type(reply) == 'table' and reply.err or reply)
  if is_refusal(why) then error(reply, 0) end
  problem = tostring(record[1]) .. ' ' .. tostring(record[2]) .. ': ' .. why
  local run = run_of(string.match(tostring(record[2]), '^[^~]*'))
  if run and get(run, 'state') == LIVE then
    put(run, 'error', cjson.encode({v = 1, id = run.id, task = head_of(run).name or '', state = 'DEAD', failure = {type = 'ScriptError', message = problem}}))
    end_run(run, FAILED)
  end
  return 0
end
local replies = {}
for n = 6, #ARGV do -- bound: the records of this call, 100 at most
  local record = cmsgpack.unpack(ARGV[n])
  replies[n - 5] = apply(record)
end
while call.budget > 0 do -- bound: ARGV 1
  local record = redis.call('LPOP', ended)
  if not record then break end
  call.budget = call.budget - 0.5
  apply(cmsgpack.unpack(record))
end
write_runs()
if call.earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == call.earliest then
  redis.call('PUBLISH', wake, string.format('%.0f', call.earliest))
end
local left, to_send = redis.call('LLEN', ended), redis.call('XLEN', outbox)
if ARGV[5] == '' and (left > 0 or to_send > 0) then redis.call('PUBLISH', wake, 'runs') end
return {left, to_send, replies, problem, failed_runs}
