-- Run outcomes: a part of advance.lua. Counts the jobs that have ended: of single nodes, and of maps.
local function add_run_outcomes(call)
  local ttl, state_of, is_counted, add, set_state = call.ttl, call.state_of, call.is_counted, call.add, call.set_state
  local is_undo, failures, keep_value, is_undoing = call.is_undo, call.failures, call.keep_value, call.is_undoing
  local undo_after_end, go_on_failing, node_of, is_on_failure = call.undo_after_end, call.go_on_failing, call.node_of, call.is_on_failure
  local note_purge, get, LIVE, succeed, fail_run, FAILED = call.note_purge, call.get, call.LIVE, call.succeed, call.fail_run, call.FAILED
  local fail_node, number, refill, end_map, is_purged = call.fail_node, call.number, call.refill, call.end_map, call.is_purged
  local outcome_of, put, need_of = call.outcome_of, call.put, call.need_of
  local BUCKET = 128 -- results in one hash
  -- Count an end that comes when the run is not live any more: what has ended then is known to a retry.
  local function end_late(run, n, node, generation, state, value)
    local node_state, current = state_of(run, n)
    if current ~= generation or not (node_state == 'active' or node_state == 'failed' or node_state == 'held' or node_state == 'ending') then return end
    if node_state == 'failed' then
      if is_counted(run, n, node) then add(run, 'bad', -1) end
    else
      add(run, node_state == 'held' and 'held' or 'active', -1)
    end
    local is_success, is_loser = state == 'SUCCESS', node_state == 'ending'
    set_state(run, n, is_success and 'late' or is_loser and 'cut' or 'failed', generation) -- a retry does not send a loser of a `first` again
    if is_counted(run, n, node) and (is_success or not is_loser) then add(run, is_success and 'done' or 'bad', 1) end
    if is_undo(node) then failures().count_undo(run, n, node, generation, node_state, state, value) end
    if is_success then keep_value(run, n, node, value) elseif not is_loser then failures().note_late(run, n, node, generation, state, value) end
    if is_success and node.u and not is_undoing(run) then undo_after_end(run) end
    go_on_failing(run)
  end
  local function end_single(run, n, generation, state, value)
    local node = node_of(run, n)
    if not node then return end
    if is_on_failure(node) then return failures().end_on_failure(run, n, generation, state) end
    local node_state, current = state_of(run, n)
    -- Its end as a dead letter comes later, from another queue.
    if state == 'PURGED' and (node_state == 'active' or node_state == 'ending') then return note_purge(run, n, node, n, generation) end
    if get(run, 'state') ~= LIVE then return end_late(run, n, node, generation, state, value) end
    if current ~= generation then return end
    if node_state == 'ending' then
      add(run, 'active', -1)
      if state == 'SUCCESS' then keep_value(run, n, node, value) end
      return set_state(run, n, 'cut', generation)
    end
    if node_state == 'held' then
      if state ~= 'SUCCESS' and state ~= 'PURGED' then return end
      add(run, 'held', -1)
    elseif node_state == 'active' then
      add(run, 'active', -1)
    else
      return
    end
    if state == 'SUCCESS' then
      succeed(run, n, node, generation, value)
    elseif node_state == 'held' then
      add(run, 'bad', 1)
      set_state(run, n, 'failed', generation)
      failures().note_failure(run, n, node, generation, state, '', true)
      fail_run(run, FAILED, failures().failure_of(run, n, node, generation, state, ''), n)
    else
      fail_node(run, n, node, generation, state, value)
    end
  end
  -- Remove the bitmap of what members of a map once were, when none is any more.
  local function remove_empty(run, n, what)
    if number(run, what .. ':' .. n) <= 0 then redis.call('DEL', run.key .. ':' .. n .. ':' .. (what == 'failed' and 'bad' or what)) end
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
    call.budget = call.budget - new / 8
    add(run, 'done:' .. n, new)
    add(run, 'held:' .. n, -held)
    add(run, 'held', -held)
    remove_empty(run, n, 'held')
    if any_failed then remove_empty(run, n, 'failed') end
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
    local is_held = redis.call('GETBIT', key .. ':held', member) == 1
    if is_held then
      if state ~= 'PURGED' and get(run, 'state') == LIVE then return end -- replayed, and dead again
      redis.call('SETBIT', key .. ':held', member, 0)
      add(run, 'held:' .. n, -1)
      add(run, 'held', -1)
      remove_empty(run, n, 'held')
      add(run, 'active', 1)
    elseif state == 'PURGED' then
      return note_purge(run, n, node, n .. '~' .. member, generation)
    end
    if is_live and not is_ignored and node.o == 'hold' and state == 'DEAD' and not is_purged(run, n .. '~' .. member, generation) then
      redis.call('SETBIT', key .. ':held', member, 1)
      add(run, 'held:' .. n, 1)
      add(run, 'held', 1)
      add(run, 'active', -1)
      return refill(run, n, node, generation)
    end
    if is_live and (is_ignored or node.o == 'continue') then
      if not is_ignored then
        add(run, 'bad', 1)
        failures().note_member(run, n, node, generation, member, state, document)
      end
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
      if not get(run, 'error:' .. n) then put(run, 'error:' .. n, failures().failure_of(run, n, node, generation, state, document, member)) end
      if is_live or state == 'DEAD' then failures().note_member(run, n, node, generation, member, state, document) end
      if not is_live then
        expire_late(run, n, {member})
        return go_on_failing(run)
      end
      local total = number(run, 'total:' .. n)
      local too_many = total - number(run, 'failed:' .. n) < need_of(node, total) and node.o ~= 'skip'
      if too_many and (node.o or 'fail') == 'fail' and not node.q then
        failures().note_failure(run, n, node, generation, state, document, true)
        return fail_run(run, FAILED, get(run, 'error:' .. n), n)
      end
    end
    if get(run, 'state') ~= LIVE then return end
    refill(run, n, node, generation)
    end_map(run, n, node, generation)
  end
  call.BUCKET, call.end_single, call.end_members, call.fail_member = BUCKET, end_single, end_members, fail_member
end
