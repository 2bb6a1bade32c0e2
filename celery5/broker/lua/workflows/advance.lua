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
-- ARGV  1 steps at most: a job that is sent is a step
--       2 channel that wakes workers
--       3 name of the queue
--       4 ttl in ms of a run that has ended
--       5 '1' when the caller is a worker: then it does what is left; else workers are notified of that
--       6.. records that are applied first, packed
-- Returns how many records are left, how many entries the outbox has, a reply for each record of ARGV, and the error of a
-- record that could not be applied ('' for none).
-- A run lives in the slot of one queue, its home, and only this script changes it. States: protocol/workflows/status.py.
-- A record may come twice: a node ends once, by its state; a member of a map once, by its bit.
local ended, prefix, definitions, outbox, due, past = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local jobs, result_prefix = KEYS[7], KEYS[8]
local streams = {[''] = KEYS[9], h = KEYS[10], l = KEYS[11]}
local budget, wake, home, ttl = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local WINDOW = 8192 -- jobs of one map on the stream
local BUCKET = 128 -- results in one hash
local KEPT = 1000 -- runs that have ended lately
local LIVE, SUCCESS, FAILED, CANCELLED, EXPIRED, UNDOING = 'live', 'success', 'failed', 'cancelled', 'expired', 'undoing'
local now = now_ms()
local runs, order, nodes, places, earliest = {}, {}, {}, {}, nil
local PAGE = 200 -- keys or nodes that one step looks at, where they are many
local HEADER = {'def', 'state', 'active', 'tail', 'until', 'parent', 'done', 'bad', 'skipped', 'error', 'work', 'wakes', 'name', 'created', 'held', 'life'}
-- Return a run, read once; false when there is none.
local function run_of(id)
  local run = runs[id]
  if run ~= nil then return run end
  local found = redis.call('HMGET', prefix .. id, unpack(HEADER))
  run = found[2] and {id = id, key = prefix .. id, fields = {}, changed = {}, work = {}} or false
  runs[id] = run
  if not run then return false end
  for n, name in ipairs(HEADER) do run.fields[name] = found[n] end -- bound: the fields above
  if found[11] then run.work = cmsgpack.unpack(found[11]) end
  order[#order + 1] = run
  return run
end
local function get(run, name)
  local value = run.fields[name]
  if value == nil then
    value = redis.call('HGET', run.key, name)
    run.fields[name] = value
  end
  return value
end
local function put(run, name, value)
  run.fields[name] = value
  run.changed[name] = true
end
local function number(run, name) return tonumber(get(run, name) or 0) end
local function add(run, name, by)
  if by ~= 0 then put(run, name, number(run, name) + by) end
end
local function write_runs()
  for _, run in ipairs(order) do -- bound: the runs of the records of this call
    put(run, 'work', run.work[1] and cmsgpack.pack(run.work) or false)
    local set, gone = {}, {}
    for name in pairs(run.changed) do -- bound: the steps of this call
      local value = run.fields[name]
      if value then set[#set + 1], set[#set + 2] = name, value else gone[#gone + 1] = name end
    end
    for first = 1, #set, 500 do -- bound: as above
      redis.call('HSET', run.key, unpack(set, first, math.min(first + 499, #set)))
    end
    for first = 1, #gone, 500 do -- bound: as above
      redis.call('HDEL', run.key, unpack(gone, first, math.min(first + 499, #gone)))
    end
    run.changed = {}
    if run.expires then redis.call('PEXPIRE', run.key, ttl) end
  end
  for first = 1, #places, 500 do -- bound: the jobs that were sent
    redis.call('HSET', jobs, unpack(places, first, math.min(first + 499, #places)))
  end
end
-- Return a node of the definition of a run; nothing when the definition is lost.
local function node_of(run, n)
  local known = nodes[run.fields.def]
  if not known then
    known = {}
    nodes[run.fields.def] = known
  end
  if known[n] == nil then
    local raw = redis.call('HGET', definitions .. run.fields.def, n)
    known[n] = raw and cmsgpack.unpack(raw) or false
  end
  return known[n]
end
local function to_outbox(...)
  redis.call('XADD', outbox, '*', ...)
end
local function record_later(...) redis.call('RPUSH', ended, cmsgpack.pack({...})) end
-- Return the state of a node, and its generation: how often it was started again.
local function state_of(run, n)
  local state = get(run, 'node:' .. n)
  if not state then return nil, 0 end
  local word, generation = string.match(state, '^(%a+) ?(%d*)$')
  return word, tonumber(generation) or 0
end
local function set_state(run, n, state, generation)
  put(run, 'node:' .. n, generation and generation > 0 and state .. ' ' .. generation or state)
end
local function member_id(run, n, generation, member, is_elsewhere)
  local id = run.id .. '~' .. n
  if generation > 0 then id = id .. '.' .. generation end
  if member then id = id .. '~' .. member end
  return is_elsewhere and id .. '@' .. home or id
end
-- Put the texts of a template into `parts`: a number stands for the value of that node, `true` for the item of a member, a
-- table for a list of templates, without those whose node was skipped.
local function render(run, template, parts, item)
  for _, part in ipairs(template) do -- bound: the parts of a message, 100 at most
    if type(part) == 'string' then
      parts[#parts + 1] = part
    elseif part == true then
      parts[#parts + 1] = item
    elseif type(part) == 'number' then
      parts[#parts + 1] = get(run, 'value:' .. part) or 'null'
    else
      parts[#parts + 1] = '['
      local is_first = true
      for _, element in ipairs(part) do -- bound: as above
        if type(element) ~= 'number' or get(run, 'value:' .. element) then
          if not is_first then parts[#parts + 1] = ',' end
          is_first = false
          render(run, {element}, parts, item)
        end
      end
      parts[#parts + 1] = ']'
    end
  end
end
-- Return the parts of the message of a job. The second one is for its id, as JSON.
local function message_parts(run, node, item)
  local parts = {'{"v":1,"id":', ''}
  render(run, node.t, parts, item)
  parts[#parts + 1] = string.format(',"sent":%.3f', now / 1000)
  if node.x then parts[#parts + 1] = string.format(',"expires":%.3f', (now + node.x) / 1000) end
  parts[#parts + 1] = (get(run, 'tail') or '') .. '}'
  return parts
end
-- Put a job on a stream of this queue.
local function send_here(node, id, message)
  local lane = node.l or ''
  places[#places + 1] = id
  places[#places + 1] = 'S' .. redis.call('XADD', streams[lane], '*', 'job', message) .. lane
  budget = budget - 1
end
local function wake_lane(node)
  local lane = node.l or ''
  if lane ~= '' and redis.call('EXISTS', streams[lane]) == 0 then redis.call('PUBLISH', wake, 'lane') end
end
-- Send one job: to a stream of this queue, or by the outbox when it goes elsewhere, has a key or a time.
local function send_job(run, n, node, generation, member, item)
  local other = node.p
  local id = member_id(run, n, generation, member, other and other.queue ~= home)
  local parts = message_parts(run, node, item)
  parts[2] = cjson.encode(id)
  if not other then
    wake_lane(node)
    return send_here(node, id, table.concat(parts))
  end
  to_outbox('job', id, 'message', table.concat(parts), 'queue', other.queue, 'task', node.task or '', 'lane', other.lane or '',
    'lock', other.lock or '', 'unique_for', other.unique_for or '', 'at', other.delay and string.format('%.0f', now + other.delay) or '')
  budget = budget - 1
end
-- Send members of a map, from the one with the number `first` on. Their messages differ in id and item only, so the rest is
-- rendered once.
local function send_members(run, n, node, generation, first, items)
  if node.p then
    for at, item in ipairs(items) do send_job(run, n, node, generation, first + at - 1, item) end -- bound: ARGV 1
    return
  end
  if not items[1] then return end
  wake_lane(node)
  local gap, gaps = {}, {}
  local parts, frame = message_parts(run, node, gap), member_id(run, n, generation) .. '~'
  for at, part in ipairs(parts) do -- bound: the parts of a message, 100 at most
    if part == gap then gaps[#gaps + 1] = at end
  end
  for at, item in ipairs(items) do -- bound: ARGV 1
    local id = frame .. first + at - 1
    parts[2] = '"' .. id .. '"' -- the id of a run has no character that JSON escapes
    for _, place in ipairs(gaps) do parts[place] = item end -- bound: as above
    send_here(node, id, table.concat(parts))
  end
end
-- Ask for a run to be looked at again, at the earliest of its deadline and what it waits for.
local function look_at(run)
  local at = number(run, 'until')
  if get(run, 'state') == LIVE and run.fields.wakes then
    for _, one in ipairs(cmsgpack.unpack(run.fields.wakes)) do at = math.min(at, one[1]) end -- bound: the nodes that wait at once, 1000 at most
  end
  redis.call('ZADD', due, at, run.id)
  if not earliest or at < earliest then earliest = at end
end
local function wake_at(run, n, at)
  local wakes = get(run, 'wakes')
  wakes = wakes and cmsgpack.unpack(wakes) or {}
  wakes[#wakes + 1] = {at, n}
  put(run, 'wakes', cmsgpack.pack(wakes))
  look_at(run)
end
local function wake_no_more(run, n)
  local wakes, left = get(run, 'wakes'), {}
  if not wakes then return end
  for _, one in ipairs(cmsgpack.unpack(wakes)) do -- bound: the nodes that wait at once, 1000 at most
    if one[2] ~= n then left[#left + 1] = one end
  end
  put(run, 'wakes', left[1] and cmsgpack.pack(left) or false)
end
local STATES = {[SUCCESS] = 'SUCCESS', [FAILED] = 'DEAD', [CANCELLED] = 'REVOKED', [EXPIRED] = 'EXPIRED'}
-- End a run: store and announce its document, let its keys expire, and tell the run that it is a part of.
local function end_run(run, state)
  local document = {'{"v":1,"id":', cjson.encode(run.id), ',"task":', cjson.encode(get(run, 'name') or ''), ',"state":"', STATES[state], '"'}
  local value = 'null'
  if state == SUCCESS then
    local node = node_of(run, number(run, 'end'))
    if node and node.t then
      local parts = {}
      render(run, node.t, parts)
      value = table.concat(parts)
    else
      document[#document + 1] = ',"reason":"stored"'
    end
  elseif get(run, 'error') then
    document[#document + 1] = ',"cause":' .. get(run, 'error')
  end
  document[#document + 1] = string.format(',"value":%s,"home":%s,"sent":%.3f,"finished":%.3f}', value, cjson.encode(home), number(run, 'created') / 1000, now / 1000)
  local text = table.concat(document)
  put(run, 'state', state)
  put(run, 'ended', now)
  put(run, 'wakes', false)
  run.expires = true
  if state == SUCCESS then run.work = {} end
  redis.call('SET', result_prefix .. run.id, text, 'PX', ttl)
  redis.call('PUBLISH', result_prefix .. run.id, text)
  redis.call('ZREM', due, run.id)
  redis.call('ZADD', past, now, run.id)
  redis.call('ZREMRANGEBYRANK', past, 0, -KEPT - 1)
  redis.call('PEXPIRE', past, ttl)
  record_later('keep', run.id, false, 0)
  if get(run, 'watched') then to_outbox('unwatch', run.id) end
  if run.fields.parent then
    local stored = state == SUCCESS and not string.find(text, '"reason":"stored"', 1, true)
    local outcome = state == SUCCESS and (stored and value or '{"$run":' .. cjson.encode(run.id) .. '}') or text
    record_later('sub', run.fields.parent, STATES[state], outcome)
  end
end
-- Compensate: send the undo task of the node that has ended last, or end the run when there is none left.
local function undo_next(run)
  local target = string.sub(get(run, 'state'), #UNDOING + 2)
  while budget > 0 do -- bound: ARGV 1
    local n = redis.call('RPOP', run.key .. ':undo')
    if not n then return end_run(run, target) end
    local node = node_of(run, tonumber(n))
    if node and node.u and not get(run, 'node:' .. node.u) then
      put(run, 'undone', 1)
      set_state(run, node.u, 'active')
      add(run, 'active', 1)
      return send_job(run, node.u, node_of(run, node.u), 0)
    end
  end
  record_later('move', run.id)
end
-- A run that is being undone has the state `undoing`, and that in which it will end.
local function is_undoing(run) return string.find(get(run, 'state'), UNDOING, 1, true) == 1 end
-- Go on with a run that fails, when all its jobs have ended.
local function go_on_failing(run)
  if is_undoing(run) and number(run, 'active') <= 0 then undo_next(run) end
end
-- Let a run fail: nothing more of it begins, what runs is revoked, and what has ended is undone.
local function fail_run(run, state, error)
  if get(run, 'state') ~= LIVE then return end
  if error and not get(run, 'error') then put(run, 'error', error) end
  put(run, 'wakes', false)
  if number(run, 'active') > 0 then to_outbox('revoke', run.id) end
  if redis.call('EXISTS', run.key .. ':undo') == 1 then
    put(run, 'state', UNDOING .. ' ' .. state)
    go_on_failing(run)
  else
    end_run(run, state)
  end
end
local function later(run, what, n, is_bad) run.work[#run.work + 1] = {what, n, is_bad} end
-- Count a node for those that depend on it.
local function feed_all(run, node, is_bad)
  for _, after in ipairs(node.f or {}) do later(run, 'feed', after, is_bad) end -- bound: the feeds of a node, 100 at most
end
-- Return whether people count a node: of a map they count the members.
local function is_counted(node) return not node.h and node.k ~= 'map' end
local function succeed(run, n, node, generation, value)
  set_state(run, n, 'done', generation)
  if node.o == 'continue' and node.k ~= 'map' then value = '{"state":"SUCCESS","value":' .. value .. '}' end
  put(run, 'value:' .. n, value)
  if is_counted(node) then add(run, 'done', 1) end
  if node.u then redis.call('RPUSH', run.key .. ':undo', n) end
  feed_all(run, node, false)
end
local function skip(run, n, node)
  set_state(run, n, 'skipped', select(2, state_of(run, n)))
  if is_counted(node) then add(run, 'skipped', 1) end
  feed_all(run, node, true)
end
local function outcome_of(state, document)
  return '{"state":"' .. state .. '","error":' .. (document ~= '' and document or 'null') .. '}'
end
-- Decide what becomes of the run when a node did not succeed.
local function fail_node(run, n, node, generation, state, document)
  if node.i and node.i[state] then
    return succeed(run, n, node, generation, 'null')
  end
  local policy = node.o or 'fail'
  if policy == 'hold' and state == 'DEAD' then
    add(run, 'held', 1)
    return set_state(run, n, 'held', generation)
  end
  if is_counted(node) then add(run, 'bad', 1) end
  if policy == 'continue' then
    set_state(run, n, 'done', generation)
    put(run, 'value:' .. n, outcome_of(state, document))
    return feed_all(run, node, false)
  end
  set_state(run, n, 'failed', generation)
  if policy == 'skip' or policy == 'count' then
    set_state(run, n, 'counted', generation)
    feed_all(run, node, true)
  elseif policy == 'apart' then
    set_state(run, n, 'counted', generation)
    if not get(run, 'error') then put(run, 'error', document ~= '' and document or outcome_of(state, '')) end
    feed_all(run, node, true)
  else
    fail_run(run, FAILED, document ~= '' and document or outcome_of(state, ''))
  end
end
-- Send members of a map, as far as its window and the budget allow: first those that a retry sends again.
local function refill(run, n, node, generation)
  local items = run.key .. ':' .. n .. ':items'
  local sent, total, again = number(run, 'sent:' .. n), number(run, 'total:' .. n), number(run, 'again:' .. n)
  local out = sent - number(run, 'done:' .. n) - number(run, 'failed:' .. n) - number(run, 'held:' .. n) - again
  local wanted = math.min((node.w or WINDOW) - out, total - sent + again)
  if wanted <= 0 then return end
  local count = math.floor(math.min(wanted, math.max(budget, 1))) -- one at least, so that each call gets on
  if count < wanted and not get(run, 'filling:' .. n) then
    put(run, 'filling:' .. n, 1)
    record_later('fill', run.id, n)
  end
  add(run, 'active', count)
  local resent = math.min(again, count)
  for _ = 1, resent do -- bound: ARGV 1
    local member = redis.call('BITPOS', run.key .. ':' .. n .. ':again', 1)
    redis.call('SETBIT', run.key .. ':' .. n .. ':again', member, 0)
    send_job(run, n, node, generation, member, redis.call('LINDEX', items, member))
  end
  add(run, 'again:' .. n, -resent)
  count = count - resent
  if count == 0 then return end
  send_members(run, n, node, generation, sent, redis.call('LRANGE', items, sent, sent + count - 1))
  put(run, 'sent:' .. n, sent + count)
end
local function need_of(node, total) return node.q and math.ceil(node.q * total - 1e-9) or total end
-- End a map when all members have ended.
local function end_map(run, n, node, generation)
  local total, bad = number(run, 'total:' .. n), number(run, 'failed:' .. n)
  if number(run, 'done:' .. n) + bad < total then return end
  local state = state_of(run, n)
  if state ~= 'active' then return end
  if total - bad >= need_of(node, total) or (bad > 0 and node.o == 'skip') then
    return succeed(run, n, node, generation, '{"$map":' .. n .. '}')
  end
  local document = get(run, 'error:' .. n) or ''
  if node.q then
    document = cjson.encode({v = 1, id = member_id(run, n, generation), task = node.task or '', state = 'DEAD', failure = {type = 'TooFewSucceeded',
      message = (total - bad) .. ' of ' .. total .. ' succeeded, needed were ' .. need_of(node, total)}})
  end
  -- A map that holds its failures ends with those whose dead letters were purged: it is not held again.
  fail_node(run, n, node, generation, node.o == 'hold' and 'PURGED' or 'DEAD', document)
end
local begin
-- Take a signal that was kept for a node that waits.
local function take_signal(run, name)
  local kept = get(run, 'kept:' .. name)
  kept = kept and cmsgpack.unpack(kept) or {}
  local value = table.remove(kept, 1)
  if value then put(run, 'kept:' .. name, kept[1] and cmsgpack.pack(kept) or false) end
  return value
end
-- Have a worker enter in the index of an event what a node waits for.
local function watch(run, n)
  put(run, 'watched:' .. n, 1)
  put(run, 'watched', 1)
  to_outbox('watch', run.id, 'node', n)
end
local function begin_wait(run, n, node)
  local value = take_signal(run, node.name)
  if value then return succeed(run, n, node, 0, value) end
  set_state(run, n, 'waiting')
  local waiting = get(run, 'waiting:' .. node.name)
  waiting = waiting and cmsgpack.unpack(waiting) or {}
  waiting[#waiting + 1] = n
  put(run, 'waiting:' .. node.name, cmsgpack.pack(waiting))
  if node.where and not get(run, 'watched:' .. n) then watch(run, n) end
  if node.d then wake_at(run, n, now + node.d) end
end
function begin(run, n, node)
  local _, generation = state_of(run, n)
  if node.k == 'job' then
    set_state(run, n, 'active', generation)
    add(run, 'active', 1)
    send_job(run, n, node, generation)
  elseif node.k == 'map' then
    set_state(run, n, 'active', generation)
    refill(run, n, node, generation)
    end_map(run, n, node, generation)
  elseif node.k == 'sleep' then
    set_state(run, n, 'waiting')
    wake_at(run, n, now + node.d)
  elseif node.k == 'wait' then
    begin_wait(run, n, node)
  elseif node.k == 'relay' then
    succeed(run, n, node, 0, 'null')
  elseif node.entry and state_of(run, node.entry) ~= 'done' then
    skip(run, n, node)
  elseif node.k == 'end' then
    if get(run, 'error') then fail_run(run, FAILED) else end_run(run, SUCCESS) end
  else
    local bad = number(run, 'bad:' .. n)
    if node.n - bad >= (node.q or node.n) then
      succeed(run, n, node, 0, 'null')
    else
      fail_node(run, n, node, 0, 'DEAD', cjson.encode({v = 1, id = member_id(run, n, 0), task = '', state = 'DEAD',
        failure = {type = 'TooFewSucceeded', message = (node.n - bad) .. ' of ' .. node.n .. ' succeeded, needed were ' .. node.q}}))
    end
  end
end
-- Count for a node that one of those that it depends on has ended.
local function feed(run, n, is_bad)
  local node = node_of(run, n)
  if not node then return fail_run(run, FAILED, outcome_of('DEAD', '')) end
  local state = state_of(run, n)
  if state and state ~= 'again' then return end
  local left = tonumber(get(run, 'left:' .. n) or node.n) - 1
  local is_gate = node.k == 'gate' or node.k == 'end'
  put(run, 'left:' .. n, left)
  if is_bad then
    if not is_gate then return skip(run, n, node) end
    add(run, 'bad:' .. n, 1)
  elseif node.first then
    set_state(run, n, 'done')
    put(run, 'value:' .. n, 'null')
    to_outbox('revoke', run.id, 'from', node.from, 'to', node.to)
    for other = node.from, node.to - 1 do -- bound: the nodes of a `first`, 1000 at most
      local its_state, generation = state_of(run, other)
      if not its_state or its_state == 'waiting' then set_state(run, other, 'cut') elseif its_state == 'active' then set_state(run, other, 'ending', generation) end
    end
    return feed_all(run, node, false)
  end
  if left <= 0 then begin(run, n, node) end
end
-- Do the work of a run that is at hand, as far as the budget goes.
local function work_on(run)
  while run.work[1] and get(run, 'state') == LIVE and budget > 0 do -- bound: ARGV 1
    local what, n, is_bad = unpack(table.remove(run.work))
    budget = budget - 0.25
    if what == 'feed' then
      feed(run, n, is_bad)
    else
      local node = node_of(run, n)
      if not node then fail_run(run, FAILED, outcome_of('DEAD', '')) else begin(run, n, node) end
    end
  end
  if run.work[1] and get(run, 'state') == LIVE then record_later('move', run.id) end
end
-- Read the parts of an id of a member: run, node, generation, and the number in a map.
local function parse(id)
  local run, n, generation, member = string.match(id, '^([^~]+)~(%d+)%.?(%d*)~?(%d*)')
  return run, tonumber(n), tonumber(generation) or 0, tonumber(member)
end
-- Count an end that comes when the run is not live any more: what has ended then is known to a retry.
local function end_late(run, n, node, generation, state, value)
  local node_state, current = state_of(run, n)
  if current ~= generation or not (node_state == 'active' or node_state == 'failed' or node_state == 'held' or node_state == 'ending') then return end
  if node_state == 'active' or node_state == 'ending' then add(run, 'active', -1) end
  local is_success = state == 'SUCCESS'
  set_state(run, n, is_success and 'late' or 'failed', generation)
  if is_success then
    put(run, 'value:' .. n, node.o == 'continue' and '{"state":"SUCCESS","value":' .. value .. '}' or value)
    if node.u and is_undoing(run) then redis.call('RPUSH', run.key .. ':undo', n) end
  end
  go_on_failing(run)
end
local function end_single(run, n, generation, state, value)
  local node = node_of(run, n)
  if not node then return end
  if get(run, 'state') ~= LIVE then return end_late(run, n, node, generation, state, value) end
  local node_state, current = state_of(run, n)
  if current ~= generation then return end
  if node_state == 'ending' then
    add(run, 'active', -1)
    return set_state(run, n, 'cut', generation)
  end
  if node_state == 'held' then
    if state ~= 'SUCCESS' and state ~= 'PURGED' then return end
    add(run, 'held', -1)
  elseif node_state == 'active' and state ~= 'PURGED' then
    add(run, 'active', -1)
  else
    return
  end
  if state == 'SUCCESS' then
    succeed(run, n, node, generation, value)
  elseif node_state == 'held' then
    add(run, 'bad', 1)
    set_state(run, n, 'failed', generation)
    fail_run(run, FAILED, outcome_of(state, ''))
  else
    fail_node(run, n, node, generation, state, value)
  end
end
-- Let the keys expire that members write which end after their run.
local function expire_late(run, n, members)
  if is_undoing(run) or get(run, 'state') == LIVE then return end
  for _, name in ipairs({':done', ':bad', ':held'}) do redis.call('PEXPIRE', run.key .. ':' .. n .. name, ttl) end -- bound: three
  for _, member in ipairs(members) do redis.call('PEXPIRE', run.key .. ':' .. n .. ':r' .. math.floor(member / BUCKET), ttl) end -- bound: one batch, 256 at most
end
-- Count members of a map that have succeeded: each once, by its bit.
local function end_members(run, n, generation, members, values)
  local node = node_of(run, n)
  local node_state, current = state_of(run, n)
  if not node or current ~= generation then return end
  local bits, key = {}, run.key .. ':' .. n
  for at, member in ipairs(members) do -- bound: the outcomes of one batch, 256 at most
    bits[4 * at - 3], bits[4 * at - 2], bits[4 * at - 1], bits[4 * at] = 'SET', 'u1', '#' .. member, 1
  end
  local old, buckets, new, held = redis.call('BITFIELD', key .. ':done', unpack(bits)), {}, 0, 0
  local any_held, any_failed, is_outcome = number(run, 'held:' .. n) > 0, number(run, 'failed:' .. n) > 0, node.o == 'continue'
  for at, member in ipairs(members) do -- bound: as above
    if old[at] == 0 then
      new = new + 1
      local bucket = math.floor(member / BUCKET)
      local words = buckets[bucket] or {}
      buckets[bucket] = words
      words[#words + 1], words[#words + 2] = member % BUCKET, is_outcome and '{"state":"SUCCESS","value":' .. values[at] .. '}' or values[at]
      if any_held and redis.call('SETBIT', key .. ':held', member, 0) == 1 then held = held + 1 end
      if any_failed and redis.call('SETBIT', key .. ':bad', member, 0) == 1 then
        add(run, 'failed:' .. n, -1)
        add(run, 'bad', -1)
        add(run, 'active', 1)
      end
    end
  end
  if new == 0 then return end
  for bucket, words in pairs(buckets) do redis.call('HSET', key .. ':r' .. bucket, unpack(words)) end -- bound: as above
  budget = budget - new / 8
  add(run, 'done:' .. n, new)
  add(run, 'held:' .. n, -held)
  add(run, 'held', -held)
  add(run, 'done', new)
  add(run, 'active', held - new)
  if get(run, 'state') ~= LIVE then
    expire_late(run, n, members)
    return go_on_failing(run)
  end
  if node_state ~= 'active' then return end
  refill(run, n, node, generation)
  end_map(run, n, node, generation)
end
-- Count a member of a map that did not succeed.
local function fail_member(run, n, generation, member, state, document)
  if state == 'SUCCESS' then return end_members(run, n, generation, {member}, {document}) end
  local node = node_of(run, n)
  local node_state, current = state_of(run, n)
  if not node or current ~= generation then return end
  local key = run.key .. ':' .. n
  local is_live, is_ignored = get(run, 'state') == LIVE and node_state == 'active', node.i and node.i[state]
  if redis.call('GETBIT', key .. ':done', member) == 1 then return end
  if state == 'PURGED' then
    if redis.call('SETBIT', key .. ':held', member, 0) == 0 then return end
    add(run, 'held:' .. n, -1)
    add(run, 'held', -1)
    add(run, 'active', 1)
  elseif redis.call('GETBIT', key .. ':held', member) == 1 then
    return
  end
  if is_live and not is_ignored and node.o == 'hold' and state == 'DEAD' then
    redis.call('SETBIT', key .. ':held', member, 1)
    add(run, 'held:' .. n, 1)
    add(run, 'held', 1)
    add(run, 'active', -1)
    return refill(run, n, node, generation)
  end
  if is_live and (is_ignored or node.o == 'continue') then
    if not is_ignored then add(run, 'bad', 1) end
    redis.call('SETBIT', key .. ':done', member, 1)
    redis.call('HSET', key .. ':r' .. math.floor(member / BUCKET), member % BUCKET,
      not is_ignored and outcome_of(state, document) or node.o == 'continue' and '{"state":"SUCCESS","value":null}' or 'null')
    add(run, 'done:' .. n, 1)
    if is_ignored then add(run, 'done', 1) end
    add(run, 'active', -1)
  else
    if redis.call('SETBIT', key .. ':bad', member, 1) == 1 then return end
    add(run, 'failed:' .. n, 1)
    add(run, 'bad', 1)
    add(run, 'active', -1)
    if not get(run, 'error:' .. n) then put(run, 'error:' .. n, document ~= '' and document or outcome_of(state, '')) end
    if not is_live then
      expire_late(run, n, {member})
      return go_on_failing(run)
    end
    local total = number(run, 'total:' .. n)
    local too_many = total - number(run, 'failed:' .. n) < need_of(node, total) and node.o ~= 'skip'
    if too_many and (node.o or 'fail') == 'fail' and not node.q then return fail_run(run, FAILED, get(run, 'error:' .. n)) end
  end
  if get(run, 'state') ~= LIVE then return end
  refill(run, n, node, generation)
  end_map(run, n, node, generation)
end
local handlers = {}
-- Start a run, unless there is one of its id. Returns 1 when it is new.
function handlers.start(id, fields, roots, totals, waits)
  if run_of(id) then return 0 end
  if redis.call('HLEN', definitions .. fields.def) ~= tonumber(fields.size) + 1 then return -1 end
  local run = {id = id, key = prefix .. id, fields = {}, changed = {}, work = {}}
  runs[id], order[#order + 1] = run, run
  for name, value in pairs(fields) do put(run, name, value) end -- bound: the header of a run and its arguments
  put(run, 'state', LIVE)
  put(run, 'created', now)
  put(run, 'until', now + fields.life)
  local life = fields.life + 2 * ttl
  if redis.call('PTTL', definitions .. fields.def) < life then redis.call('PEXPIRE', definitions .. fields.def, string.format('%.0f', life)) end
  for _, n in ipairs(totals) do -- bound: the maps of a plan, 500 at most
    local items = run.key .. ':' .. n .. ':items'
    put(run, 'total:' .. n, redis.call('LLEN', items))
    redis.call('PERSIST', items)
    add(run, 'all', run.fields['total:' .. n])
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
-- A run that is a part of another one has ended: the node in whose place it was ends with it.
function handlers.sub(frame, state, outcome)
  if state == 'SUCCESS' then return handlers.one(frame, outcome) end
  return handlers['end'](frame, state, outcome)
end
-- Go on sending members of a map.
function handlers.fill(id, n)
  local run = run_of(id)
  if not run then return end
  put(run, 'filling:' .. n, false)
  local node_state, generation = state_of(run, n)
  if get(run, 'state') == LIVE and node_state == 'active' then refill(run, n, node_of(run, n), generation) end
end
function handlers.move(id)
  local run = run_of(id)
  if not run then return end
  if is_undoing(run) then return go_on_failing(run) end
  if get(run, 'state') == LIVE then work_on(run) end
end
function handlers.due(id)
  local run = run_of(id)
  if not run then return redis.call('ZREM', due, id) end
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
-- Cancel a run. Returns its state.
function handlers.cancel(id)
  local run = run_of(id)
  if not run then return '' end
  fail_run(run, CANCELLED)
  return get(run, 'state')
end
-- Give a value to a node that waits for it, or keep it. Returns whether the run takes it.
function handlers.signal(id, name, value, signal_id)
  local run = run_of(id)
  if not run or get(run, 'state') ~= LIVE then return 0 end
  local known = get(run, 'seen:' .. name)
  known = known and cmsgpack.unpack(known) or {}
  for _, one in ipairs(known) do -- bound: 100
    if one == signal_id then return 1 end
  end
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
      look_at(run)
      return 1
    end
  end
  local kept = get(run, 'kept:' .. name)
  kept = kept and cmsgpack.unpack(kept) or {}
  if #kept >= 100 then return -1 end
  kept[#kept + 1] = value
  put(run, 'kept:' .. name, cmsgpack.pack(kept))
  return 1
end
-- Put a workflow that a job has returned in the place of its node: the job is settled now, so it is live now.
function handlers.graft(frame, packed)
  local id, n, generation = parse(frame)
  local run = id and run_of(id)
  local node = run and node_of(run, n)
  local node_state, current = nil, 0
  if node then node_state, current = state_of(run, n) end
  if node_state ~= 'active' or current ~= generation or get(run, 'run:' .. n) then return end
  if get(run, 'state') ~= LIVE then return end_single(run, n, generation, 'REVOKED', '') end
  local record = cmsgpack.unpack(packed)
  put(run, 'run:' .. n, record[2])
  record[3].parent, record[3].life = frame, math.max(1, number(run, 'until') - now)
  if handlers.start(unpack(record, 2)) == -1 then
    end_single(run, n, generation, 'DEAD', cjson.encode({v = 1, id = frame, task = node.task or '', state = 'DEAD',
      failure = {type = 'ResultLost', message = 'the workflow that the job returned was lost before it began'}}))
    work_on(run)
  end
end
-- Have the keys of a run expire, or stay, from a position on: there may be many.
function handlers.keep(id, stays, from)
  local key, position, last = prefix .. id, 0, from + PAGE
  local maps = redis.call('HGET', definitions .. (redis.call('HGET', key, 'def') or ''), 'maps')
  local function visit(name)
    if position >= from and position < last then
      if stays then redis.call('PERSIST', key .. name) else redis.call('PEXPIRE', key .. name, ttl) end
    end
    position = position + 1
  end
  visit('')
  visit(':undo')
  for _, n in ipairs(maps and cmsgpack.unpack(maps) or {}) do -- bound: the maps of a plan, 500 at most
    for _, name in ipairs({':items', ':done', ':bad', ':held', ':again'}) do visit(':' .. n .. name) end -- bound: five
    local buckets, base = math.ceil(tonumber(redis.call('HGET', key, 'total:' .. n) or 0) / BUCKET), position
    for bucket = math.max(0, from - base), math.min(buckets, last - base) - 1 do -- bound: PAGE
      position = base + bucket
      visit(':' .. n .. ':r' .. bucket)
    end
    position = base + buckets
    if position >= last then break end
  end
  budget = budget - PAGE / 8
  if position >= last then record_later('keep', id, stays, last) end
end
-- Reset a node for a retry: what failed, was skipped or waited begins again. What succeeded too late is counted now.
local function reset(run, n, node)
  local node_state, generation = state_of(run, n)
  if not node_state or node_state == 'done' or node_state == 'again' or node_state == 'cut' then return end
  if node_state == 'late' then
    set_state(run, n, 'done', generation)
    if is_counted(node) then add(run, 'done', 1) end
    return feed_all(run, node, false)
  end
  if node_state == 'counted' or node_state == 'skipped' then
    for _, after in ipairs(node.f or {}) do -- bound: the feeds of a node, 100 at most
      local other = node_of(run, after)
      add(run, 'left:' .. after, get(run, 'left:' .. after) and 1 or 0)
      if other and (other.k == 'gate' or other.k == 'end') then add(run, 'bad:' .. after, -1) end
    end
  end
  if is_counted(node) then
    if node_state == 'skipped' then add(run, 'skipped', -1) elseif node_state == 'counted' or node_state == 'failed' then add(run, 'bad', -1) end
  end
  if node_state == 'held' then add(run, 'held', -1) end
  put(run, 'run:' .. n, false)
  set_state(run, n, 'again', generation + 1)
  if node.k == 'map' and node_state ~= 'skipped' then
    local key = run.key .. ':' .. n
    for _, name in ipairs({'bad', 'held'}) do redis.call('BITOP', 'OR', key .. ':again', key .. ':again', key .. ':' .. name) end -- bound: two
    redis.call('DEL', key .. ':bad', key .. ':held')
    local again = number(run, 'failed:' .. n) + number(run, 'held:' .. n)
    add(run, 'again:' .. n, again)
    add(run, 'bad', -number(run, 'failed:' .. n))
    add(run, 'held', -number(run, 'held:' .. n))
    put(run, 'failed:' .. n, 0)
    put(run, 'held:' .. n, 0)
    put(run, 'error:' .. n, false)
  end
  if node_state ~= 'skipped' and node.k ~= 'end' and not (node.k == 'gate' and number(run, 'left:' .. n) > 0) then later(run, 'begin', n) end
end
-- Start what has failed in a run again, PAGE nodes from `from` on. Returns the node to go on from, 0 when the run is live again,
-- -1 when it has not failed, -2 when its jobs have not all ended, -3 when it was undone, -4 when it is not known.
function handlers.again(id, from)
  local run = run_of(id)
  if not run then return -4 end
  local state = get(run, 'state')
  if state == LIVE or state == SUCCESS then return -1 end
  if is_undoing(run) or number(run, 'active') > 0 then return -2 end
  if get(run, 'undone') then return -3 end
  local size = redis.call('HLEN', definitions .. run.fields.def) - 1
  if size < 1 then return -4 end
  if from == 0 then record_later('keep', run.id, true, 0) end
  for n = from, math.min(from + PAGE, size) - 1 do -- bound: PAGE
    local node = node_of(run, n)
    if node then reset(run, n, node) end
  end
  if from + PAGE < size then return from + PAGE end
  put(run, 'state', LIVE)
  put(run, 'error', false)
  put(run, 'until', now + number(run, 'life'))
  local life = number(run, 'life') + 2 * ttl
  if redis.call('PTTL', definitions .. run.fields.def) < life then redis.call('PEXPIRE', definitions .. run.fields.def, string.format('%.0f', life)) end
  redis.call('DEL', result_prefix .. id)
  redis.call('ZREM', past, id)
  redis.call('PERSIST', run.key)
  look_at(run)
  work_on(run)
  return 0
end
-- Apply a record. One that raises an error ends its run: nobody knows what is true of it any more.
local problem = ''
local function apply(record)
  local handler = handlers[record[1]]
  if not handler then return 0 end
  local done, reply = pcall(handler, unpack(record, 2))
  if done then return reply or 0 end
  problem = tostring(record[1]) .. ' ' .. tostring(record[2]) .. ': ' .. tostring(type(reply) == 'table' and reply.err or reply)
  local run = run_of(string.match(tostring(record[2]), '^[^~]*'))
  if run and get(run, 'state') == LIVE then
    put(run, 'error', cjson.encode({v = 1, id = run.id, task = get(run, 'name') or '', state = 'DEAD', failure = {type = 'ScriptError', message = problem}}))
    end_run(run, FAILED)
  end
  return 0
end
local replies = {}
for n = 6, #ARGV do -- bound: the records of this call, 100 at most
  local record = cmsgpack.unpack(ARGV[n])
  replies[n - 5] = apply(record)
end
while budget > 0 do -- bound: ARGV 1
  local record = redis.call('LPOP', ended)
  if not record then break end
  budget = budget - 0.5
  apply(cmsgpack.unpack(record))
end
write_runs()
if earliest and tonumber(redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]) == earliest then
  redis.call('PUBLISH', wake, string.format('%.0f', earliest))
end
local left, to_send = redis.call('LLEN', ended), redis.call('XLEN', outbox)
if ARGV[5] == '' and (left > 0 or to_send > 0) then redis.call('PUBLISH', wake, 'runs') end
return {left, to_send, replies, problem}
