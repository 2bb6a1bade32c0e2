-- Run nodes: a part of advance.lua. What the end of a node means for those that depend on it, and for the run.
local function add_run_nodes(call)
  local prefix, get, put, undo_later, set_state, add = call.prefix, call.get, call.put, call.undo_later, call.set_state, call.add
  local state_of, LIVE, number, failures, note_error = call.state_of, call.LIVE, call.number, call.failures, call.note_error
  local fail_run, FAILED = call.fail_run, call.FAILED
  local function later(run, what, n, is_bad) run.work[#run.work + 1] = {what, n, is_bad} end
  -- Count a node for those that depend on it.
  local function feed_all(run, node, is_bad)
    for _, after in ipairs(node.f or {}) do later(run, 'feed', after, is_bad) end -- bound: the feeds of a node, 100 at most
  end
  -- Return whether people count a node: of a map they count the members, as soon as they are known.
  local function is_counted(run, n, node) return not node.h and (node.k ~= 'map' or not get(run, 'total:' .. n)) end
  -- Keep the value of a node that has succeeded. It is undone if the run fails, whether or not the run waited for it.
  local function keep_value(run, n, node, value)
    local is_reference = string.sub(value, 1, 1) == '@' -- where the value is: no JSON begins so
    if node.o == 'continue' and node.k ~= 'map' then value = is_reference and '@outcome ' .. value or '{"state":"SUCCESS","value":' .. value .. '}' end
    put(run, 'value:' .. n, value)
    if node.u then undo_later(run, n) end
    local child = node.dynamic and get(run, 'run:' .. n)
    if child and redis.call('EXISTS', prefix .. child .. ':undo') == 1 then undo_later(run, 'run ' .. n) end
  end
  local function succeed(run, n, node, generation, value)
    set_state(run, n, 'done', generation)
    keep_value(run, n, node, value)
    if is_counted(run, n, node) then add(run, 'done', 1) end
    feed_all(run, node, false)
  end
  local function skip(run, n, node)
    set_state(run, n, 'skipped', select(2, state_of(run, n)))
    if is_counted(run, n, node) then add(run, 'skipped', 1) end
    feed_all(run, node, true)
  end
  local function outcome_of(state, document)
    return '{"state":"' .. state .. '","error":' .. (document ~= '' and document or 'null') .. '}'
  end
  -- Note that a dead letter was purged before its run knew of it. The run does not hold for that job: nothing is left to be replayed.
  local function note_purge(run, n, node, what, generation)
    local node_state, current = state_of(run, n)
    if node.o == 'hold' and get(run, 'state') == LIVE and node_state == 'active' and current == generation then put(run, 'purged:' .. what, generation) end
  end
  local function is_purged(run, what, generation) return get(run, 'purged:' .. what) and number(run, 'purged:' .. what) == generation end
  -- Decide what becomes of the run when a node did not succeed.
  local function fail_node(run, n, node, generation, state, document)
    if node.i and node.i[state] then
      return succeed(run, n, node, generation, 'null')
    end
    local policy = node.o or 'fail'
    -- The dead letters of a child are its own: it holds them itself.
    if policy == 'hold' and state == 'DEAD' and not is_purged(run, n, generation) and not (node.dynamic and get(run, 'run:' .. n)) then
      add(run, 'held', 1)
      return set_state(run, n, 'held', generation)
    end
    if is_counted(run, n, node) then add(run, 'bad', 1) end
    failures().note_failure(run, n, node, generation, state, document, policy == 'fail' or policy == 'apart' or policy == 'hold')
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
      note_error(run, failures().failure_of(run, n, node, generation, state, document), n)
      feed_all(run, node, true)
    else
      fail_run(run, FAILED, failures().failure_of(run, n, node, generation, state, document), n)
    end
  end
  call.later, call.feed_all, call.is_counted, call.keep_value, call.succeed = later, feed_all, is_counted, keep_value, succeed
  call.skip, call.outcome_of, call.note_purge, call.is_purged, call.fail_node = skip, outcome_of, note_purge, is_purged, fail_node
end
