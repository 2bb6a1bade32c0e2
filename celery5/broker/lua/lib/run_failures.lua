-- Run failures: a part of advance.lua. Notes what has failed in a run, and counts what is undone of it. Sends the `on_failure` jobs of
-- steps and of runs, once for each failure. A run neither counts these jobs nor waits for them, and does not stop them.
local function add_run_failures(call)
  local failed_runs, undoing, now, prefix, ttl, member_id = call.failed_runs, call.undoing, call.now, call.prefix, call.ttl, call.member_id
  local get, put, node_of, state_of, set_state, send_job = call.get, call.put, call.node_of, call.state_of, call.set_state, call.send_job
  local head_of, STATES, EXPIRED, number, KEPT = call.head_of, call.STATES, call.EXPIRED, call.number, call.KEPT
  local LOOK_INTERVAL, add, root_of, is_undoing = call.LOOK_INTERVAL, call.add, call.root_of, call.is_undoing
  local function is_on_failure(node) return node.k == 'job' and node.h and node.name == 'on_failure' end
  local failure_functions = nil
  -- Return the functions for runs in which something fails. They are made at the first failure of a call: to make them takes time.
  local function failures()
    if failure_functions then return failure_functions end
    local MOST_ERRORS = 20 -- that one `on_failure` job gets
    local MOST_MESSAGE_BYTES = 2000 -- bytes
    local MOST_LOGGED = 100 -- runs that fail in one call
    local WITHOUT_DOCUMENT = {REVOKED = 'it was revoked', EXPIRED = 'it expired', REJECTED = 'it was rejected', LOST = 'Redis lost the job',
      PURGED = 'its dead letter was purged', HELD = 'its run stopped before it was replayed'}
    local function text_of(value) return type(value) == 'string' and value or '' end
    -- Return the document of a job that did not succeed. Make one where it has none.
    local function failure_of(run, n, node, generation, state, document, member)
      if document and document ~= '' then return document end
      return cjson.encode({v = 1, id = member_id(run, n, generation, member, node.p), task = node.task or '', state = state,
        failure = {type = string.sub(state, 1, 1) .. string.lower(string.sub(state, 2)), message = WITHOUT_DOCUMENT[state] or 'it did not succeed'}})
    end
    -- Return a text of at most `most` bytes, cut between two characters.
    local function cut_text(text, most)
      if #text <= most then return text end
      while most > 0 and string.find(text, '^[\128-\191]', most + 1) do most = most - 1 end -- bound: the bytes of a character
      return string.sub(text, 1, most) .. '...'
    end
    -- Return an error as `on_failure` jobs get it. Where a child has failed, it is the error of the job that failed in the child.
    local function error_of(run, n, document)
      local is_readable, found = pcall(cjson.decode, document)
      found = is_readable and type(found) == 'table' and found or {}
      for _ = 1, 1000 do -- bound: as deep as cjson reads
        local inner = type(found.cause) == 'table' and found.cause or found.error
        if type(inner) ~= 'table' then break end
        found = inner
      end
      local failure, state = type(found.failure) == 'table' and found.failure or {}, text_of(found.state)
      local message, reason = text_of(failure.message), text_of(found.reason)
      return cjson.encode({id = text_of(found.id), run = run.id, node = n, task = text_of(found.task), state = state,
        type = failure.type and text_of(failure.type) or string.sub(state, 1, 1) .. string.lower(string.sub(state, 2)),
        message = cut_text(message ~= '' and message or reason ~= '' and reason or WITHOUT_DOCUMENT[state] or '', MOST_MESSAGE_BYTES),
        reason = state == 'DEAD' and reason or nil})
    end
    local function errors_in(run, name) return get(run, name) and cmsgpack.unpack(run.fields[name]) or {} end
    local function keep_error(run, name, error)
      local errors = errors_in(run, name)
      if #errors >= MOST_ERRORS then return end
      errors[#errors + 1] = error
      put(run, name, cmsgpack.pack(errors))
    end
    -- Send an `on_failure` job with what has failed, unless it was sent for this generation.
    local function send_on_failure(run, n, generation, errors)
      local node, state, sent = node_of(run, n), state_of(run, n)
      if not node or (state and state ~= 'cut' and sent >= generation) then return end -- cut with the others of a `first`
      if get(run, 'args') and redis.call('EXISTS', run.key .. ':args') == 0 then return end -- lost: its arguments are not known
      while #errors > MOST_ERRORS do table.remove(errors) end -- bound: two
      put(run, 'value:' .. n, '[' .. table.concat(errors, ',') .. ']')
      set_state(run, n, 'active', generation)
      send_job(run, n, node, generation)
      put(run, 'value:' .. n, false)
    end
    local function end_on_failure(run, n, generation, state)
      if select(2, state_of(run, n)) == generation then set_state(run, n, state == 'SUCCESS' and 'done' or 'failed', generation) end
    end
    -- Return whether an `on_failure` job gets the errors of a node.
    local function wants_errors(run, node) return node.e or head_of(run).fail end
    -- Keep the error of a member of a map until the map ends.
    local function note_member(run, n, node, generation, member, state, document)
      if wants_errors(run, node) then keep_error(run, 'errors:' .. n, error_of(run, n, failure_of(run, n, node, generation, state, document, member))) end
    end
    -- Send the `on_failure` job of a map, some members of which have failed.
    local function note_members(run, n, node, generation)
      if node.e and get(run, 'errors:' .. n) then send_on_failure(run, node.e, generation, errors_in(run, 'errors:' .. n)) end
    end
    -- Note that a node has failed, and whether its run fails for it.
    local function note_failure(run, n, node, generation, state, document, fails_run)
      if not wants_errors(run, node) then return end
      local errors = errors_in(run, 'errors:' .. n)
      if not errors[1] or node.q then table.insert(errors, 1, error_of(run, n, failure_of(run, n, node, generation, state, document))) end
      for _, error in ipairs(fails_run and head_of(run).fail and errors or {}) do keep_error(run, 'errors', error) end -- bound: MOST_ERRORS and one
      if node.e then send_on_failure(run, node.e, generation, errors) end
    end
    -- Note a failure in a run that is not live any more. A job that was revoked has not failed: the run has stopped it.
    local function note_late(run, n, node, generation, state, document)
      if state == 'DEAD' and node.k ~= 'map' and not node.h then note_failure(run, n, node, generation, state, document, true) end
    end
    -- Note for the log that a run has failed or expired, and send its `on_failure` job.
    local function note_failed_run(run, state)
      local head = head_of(run)
      if not run.fields.root and #failed_runs < MOST_LOGGED then
        failed_runs[#failed_runs + 1] = {run.id, head.name or '', STATES[state], get(run, 'error') and error_of(run, tonumber(get(run, 'failed_at')), run.fields.error) or ''}
      end
      if not head.fail then return end
      local errors = errors_in(run, 'errors')
      if state == EXPIRED then
        table.insert(errors, 1, cjson.encode({id = run.id, run = run.id, task = head.name or '', state = 'EXPIRED', type = 'WorkflowExpired',
          message = 'the run did not end before its deadline'}))
      elseif not errors[1] then
        errors[1] = error_of(run, nil, get(run, 'error') or '')
      end
      send_on_failure(run, head.fail, number(run, 'retries'), errors)
      put(run, 'errors', false)
    end
    -- Enter a run among those that stop or are undone; for a child its root.
    local function note_undoing(run)
      redis.call('ZADD', undoing, 'NX', now, run.fields.root or run.id)
      redis.call('ZREMRANGEBYRANK', undoing, 0, -KEPT - 1)
      for _, id in ipairs(redis.call('ZRANGE', undoing, 0, 4)) do -- bound: five
        if id ~= run.id and redis.call('EXISTS', prefix .. id) == 0 then redis.call('ZREM', undoing, id) end -- it has expired
      end
      redis.call('PEXPIRE', undoing, math.max(tonumber(ttl), 60 * LOOK_INTERVAL))
    end
    local function begin_undo(run)
      local count = redis.call('LLEN', run.key .. ':undo')
      add(run, 'undos', count)
      note_undoing(run)
    end
    -- Remove a run that has ended from those that stop or are undone, unless an undo job of it is dead.
    local function end_undo(run)
      run = root_of(run) or run
      if not is_undoing(run) and number(run, 'undo_bad') <= number(run, 'undo_purged') then redis.call('ZREM', undoing, run.id) end
    end
    -- Count an undo job that has ended. `before` is its state until now: `failed` when its dead letter was replayed or purged.
    local function count_undo(run, n, node, generation, before, state, document)
      local root = root_of(run)
      if state == 'PURGED' and before == 'failed' then
        add(run, 'undo_purged', 1)
        set_state(run, n, 'counted', generation) -- it cannot be replayed any more
        return end_undo(run)
      end
      if state ~= 'SUCCESS' and before ~= 'failed' then note_failure(run, n, node, generation, state, document, true) end
      add(run, 'undo_bad', (state == 'SUCCESS' and 0 or 1) - (before == 'failed' and 1 or 0))
      if state == 'SUCCESS' then
        add(run, 'undo_done', 1)
        if get(run, 'undo_failed_at') == tostring(n) then put(run, 'undo_error', false) end
        if root and number(root, 'undo_bad') <= 0 then put(root, 'undo_error', false) end
      elseif not get(run, 'undo_error') then
        put(run, 'undo_error', failure_of(run, n, node, generation, state, document))
        put(run, 'undo_failed_at', tostring(n))
        put(run, 'undo_of', node.of or false)
        if root and not get(root, 'undo_error') then put(root, 'undo_error', run.fields.undo_error) end
      end
      end_undo(run)
    end
    failure_functions = {failure_of = failure_of, end_on_failure = end_on_failure, note_member = note_member, note_members = note_members, note_failure = note_failure, note_late = note_late,
      note_failed_run = note_failed_run, note_undoing = note_undoing, begin_undo = begin_undo, end_undo = end_undo, count_undo = count_undo}
    return failure_functions
  end
  call.is_on_failure, call.failures = is_on_failure, failures
end
