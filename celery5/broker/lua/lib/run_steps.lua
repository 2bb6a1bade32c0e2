-- Run steps: a part of advance.lua. Begins nodes, and counts for each how many of those before it have ended.
local function add_run_steps(call)
  local now, get, put, to_outbox, life_of, succeed = call.now, call.get, call.put, call.to_outbox, call.life_of, call.succeed
  local set_state, wake_at, state_of, add, retry_child = call.set_state, call.wake_at, call.state_of, call.add, call.retry_child
  local send_job, begin_map, skip, fail_run, FAILED = call.send_job, call.begin_map, call.skip, call.fail_run, call.FAILED
  local end_run, SUCCESS, number, fail_node, member_id = call.end_run, call.SUCCESS, call.number, call.fail_node, call.member_id
  local node_of, outcome_of, record_later, feed_all = call.node_of, call.outcome_of, call.record_later, call.feed_all
  local may_begin = call.may_begin
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
    to_outbox('watch', run.id, 'node', n, 'life', string.format('%.0f', life_of(run)))
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
      if not retry_child(run, n, node, generation) then send_job(run, n, node, generation) end
    elseif node.k == 'map' then
      begin_map(run, n, node, generation)
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
    put(run, 'left:' .. n, left)
    if is_bad then
      add(run, 'bad:' .. n, 1)
    elseif node.first then
      set_state(run, n, 'done')
      put(run, 'value:' .. n, 'null')
      to_outbox('revoke', run.id, 'retries', number(run, 'retries'), 'from', node.from, 'to', node.to)
      for other = node.from, node.to - 1 do -- bound: the nodes of a `first`, 1000 at most
        local its_state, generation = state_of(run, other)
        if not its_state or its_state == 'waiting' or its_state == 'again' then
          set_state(run, other, 'cut', generation)
        elseif its_state == 'held' then -- nobody waits for its dead letter any more
          add(run, 'held', -1)
          set_state(run, other, 'cut', generation)
        elseif its_state == 'active' then
          set_state(run, other, 'ending', generation)
          local child = get(run, 'run:' .. other)
          if child then record_later('cancel', child) end
        end
      end
      return feed_all(run, node, false)
    end
    if left > 0 then return end -- also what will be skipped waits for all before it: the run ends when they have ended
    local is_gate = node.k == 'gate' or node.k == 'end'
    if is_gate or number(run, 'bad:' .. n) <= 0 then begin(run, n, node) else skip(run, n, node) end
  end
  -- Do the work of a run that is at hand, as far as the budget goes.
  local function work_on(run)
    while run.work[1] and may_begin(run) and call.budget > 0 do -- bound: ARGV 1
      local what, n, is_bad = unpack(table.remove(run.work))
      call.budget = call.budget - 0.25
      if what == 'feed' then
        feed(run, n, is_bad)
      else
        local node = node_of(run, n)
        if not node then fail_run(run, FAILED, outcome_of('DEAD', '')) else begin(run, n, node) end
      end
    end
    if run.work[1] and may_begin(run) then record_later('move', run.id) end
  end
  call.watch, call.work_on = watch, work_on
end
