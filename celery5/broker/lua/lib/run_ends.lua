-- Run ends: a part of advance.lua. When a run is looked at again, and how it ends, fails and is undone.
local function add_run_ends(call)
  local now, due, home, result_prefix, ttl, past = call.now, call.due, call.home, call.result_prefix, call.ttl, call.past
  local is_undoing, LOOK_INTERVAL, number, get, LIVE, put = call.is_undoing, call.LOOK_INTERVAL, call.number, call.get, call.LIVE, call.put
  local node_of, head_of, record_later, root_of, add = call.node_of, call.head_of, call.record_later, call.root_of, call.add
  local SUCCESS, FAILED, STATES, render, has_ended, KEPT = call.SUCCESS, call.FAILED, call.STATES, call.render, call.has_ended, call.KEPT
  local to_outbox, EXPIRED, failures, run_of, UNDOING = call.to_outbox, call.EXPIRED, call.failures, call.run_of, call.UNDOING
  local CANCELLED, state_of, set_state, send_job, is_busy = call.CANCELLED, call.state_of, call.set_state, call.send_job, call.is_busy
  local parse, undo_later = call.parse, call.undo_later
  -- Ask for a run to be looked at again, at the earliest of its deadline and what it waits for.
  local function look_at(run)
    if run.fields.root then return end -- its deadline is that of the run that it is a part of, and it waits for jobs only
    local at = is_undoing(run) and now + LOOK_INTERVAL or number(run, 'until')
    if get(run, 'state') == LIVE and run.fields.wakes then
      for _, one in ipairs(cmsgpack.unpack(run.fields.wakes)) do at = math.min(at, one[1]) end -- bound: the nodes that wait at once, 1000 at most
    end
    redis.call('ZADD', due, at, run.id)
    if not call.earliest or at < call.earliest then call.earliest = at end
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
  -- Return what the parent of a run that has succeeded takes for its value: JSON, or where it is: `@run` and an id. Where it is the value
  -- of one node, which itself says where it is, that is passed on: it is found at once, however many runs are inside each other.
  local function value_for_parent(run, text)
    if text then return text end
    local last = node_of(run, head_of(run)['end'])
    local at = last and last.a and last.a.value
    local value = type(at) == 'table' and #at == 1 and type(at[1]) == 'number' and get(run, 'value:' .. at[1])
    return value and string.sub(value, 1, 5) ~= '@map ' and value or '@run ' .. run.id
  end
  -- Record for the parent of a run how the run has ended, or that it is undone.
  local function notify_parent(run, state, document, text)
    if get(run, 'undone_by_parent') then
      put(run, 'undone_by_parent', false)
      return record_later('child_undone', run.fields.parent)
    end
    -- What has not begun never will, unless the run is retried: nobody waits for it.
    local never_begun = number(run, 'all') - number(run, 'done') - number(run, 'bad') - number(run, 'skipped') - number(run, 'active') - number(run, 'held')
    local root = root_of(run)
    put(run, 'never_begun', math.max(0, never_begun))
    if root then add(root, 'skipped', run.fields.never_begun) end
    -- What is passed on of a failure is the document of the job that has failed, however many runs are inside each other.
    local outcome = state == SUCCESS and value_for_parent(run, text) or state == FAILED and get(run, 'error') or document
    record_later('sub', run.fields.parent, STATES[state], outcome)
  end
  -- End a run: store and publish its document, let its keys expire, and notify its parent.
  local function end_run(run, state)
    local document = {'{"v":1,"id":', cjson.encode(run.id), ',"task":', cjson.encode(head_of(run).name or ''), ',"state":"', STATES[state], '"'}
    local value = nil
    if state == SUCCESS then
      local last = head_of(run)['end']
      local node = last and node_of(run, last)
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
    document[#document + 1] = string.format(',"value":%s,"home":%s,"sent":%.3f,"finished":%.3f}', value or 'null', cjson.encode(home), number(run, 'created') / 1000, now / 1000)
    local text = table.concat(document)
    put(run, 'state', state)
    put(run, 'ended', now)
    put(run, 'wakes', false)
    local root = root_of(run)
    run.expires = not root or has_ended(root) -- a child stays for as long as the run that it is a part of
    if state == SUCCESS then run.work = {} end
    redis.call('SET', result_prefix .. run.id, text, 'PX', ttl)
    redis.call('PUBLISH', result_prefix .. run.id, text)
    redis.call('ZREM', due, run.id)
    if not run.fields.root then
      redis.call('ZADD', past, now, run.id)
      redis.call('ZREMRANGEBYRANK', past, 0, -KEPT - 1)
      redis.call('PEXPIRE', past, ttl)
    end
    if run.expires then record_later('keep', run.id, false, 0) end
    if get(run, 'watched') then to_outbox('unwatch', run.id) end
    if run.fields.parent then notify_parent(run, state, text, value) end
    if state == FAILED or state == EXPIRED then failures().note_failed_run(run, state) end
  end
  local undo_next
  -- Undo a child that has succeeded. Returns whether there is anything to undo.
  local function undo_child(run, n)
    local child = run_of(get(run, 'run:' .. n) or '')
    if not child or get(child, 'state') ~= SUCCESS then return false end
    put(run, 'undone', 1)
    put(run, 'undoing:' .. n, 1)
    add(run, 'active', 1)
    put(child, 'undone_by_parent', 1)
    put(child, 'state', UNDOING .. ' ' .. CANCELLED)
    failures().begin_undo(child)
    undo_next(child)
    return true
  end
  -- Send the undo task of the node that has ended last. Returns whether one is left.
  local function send_undo(run)
    while call.budget > 0 do -- bound: ARGV 1
      local n = redis.call('RPOP', run.key .. ':undo')
      if not n then return false end
      local with_child = string.match(n, '^run (%d+)$')
      if with_child then add(run, 'undos', -1) end -- what is undone of the child is counted there
      if with_child and undo_child(run, tonumber(with_child)) then return true end
      local node = not with_child and node_of(run, tonumber(n))
      local undo_state = node and node.u and state_of(run, node.u)
      if node and node.u and (not undo_state or undo_state == 'cut') then -- cut with the others of a `first`
        put(run, 'undone', 1)
        set_state(run, node.u, 'active')
        add(run, 'active', 1)
        send_job(run, node.u, node_of(run, node.u), 0)
        return true
      end
    end
    record_later('move', run.id)
    return true
  end
  -- Compensate: undo the node that has ended last, or end the run when there is none left.
  function undo_next(run)
    if send_undo(run) then return end
    end_run(run, string.sub(get(run, 'state'), #UNDOING + 2))
    failures().end_undo(run)
  end
  -- Go on with a run that fails, when all its jobs have ended, and with the one that it is a part of.
  local function go_on_failing(run)
    local root = root_of(run)
    if is_undoing(run) and not is_busy(run) then undo_next(run) end
    if root and is_undoing(root) and not is_busy(root) then undo_next(root) end
  end
  -- Note why a run fails, and at which node. Only the first failure counts.
  local function note_error(run, error, n)
    if not error or get(run, 'error') then return end
    put(run, 'error', error)
    put(run, 'failed_at', n or false)
  end
  -- Let a run fail: nothing more of it begins, what runs is revoked, and what has ended is undone. `n` is the node for which it fails.
  local function fail_run(run, state, error, n)
    if get(run, 'state') ~= LIVE then return end
    note_error(run, error, n)
    put(run, 'wakes', false)
    local is_active = is_busy(run)
    if is_active then to_outbox('revoke', run.id, 'retries', number(run, 'retries')) end
    local has_children = is_active and redis.call('EXISTS', run.key .. ':children') == 1
    if has_children then record_later('stop', run.id, 0) end
    -- What runs still may succeed, and is undone then. A run is cancelled when nothing of it can begin any more, and ends after its children.
    if redis.call('EXISTS', run.key .. ':undo') == 1 or (is_active and (head_of(run).undo or has_children or state == CANCELLED)) then
      put(run, 'state', UNDOING .. ' ' .. state)
      failures().begin_undo(run)
      look_at(run)
      go_on_failing(run)
    else
      end_run(run, state)
    end
  end
  -- Undo a step that has succeeded when its run had ended: the run ends once.
  local function undo_after_end(run)
    if get(run, 'state') == SUCCESS then
      local root = root_of(run)
      if not root or has_ended(root) then return redis.call('PEXPIRE', run.key .. ':undo', ttl) end
      local id, n = parse(run.fields.parent)
      if redis.call('LLEN', run.key .. ':undo') == 1 and run_of(id) then undo_later(run_of(id), 'run ' .. n) end -- the first of this child
      return
    end
    failures().note_undoing(run)
    send_undo(run)
  end
  call.look_at, call.wake_at, call.wake_no_more, call.end_run, call.send_undo = look_at, wake_at, wake_no_more, end_run, send_undo
  call.go_on_failing, call.note_error, call.fail_run, call.undo_after_end = go_on_failing, note_error, fail_run, undo_after_end
end
