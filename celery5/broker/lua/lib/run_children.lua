-- Run children: a part of advance.lua. A child is a run that a job has returned. It lives, stops, is retried, undone and kept with its parent.
local function add_run_children(call)
  local now, definitions, number, put, run_of, get = call.now, call.definitions, call.number, call.put, call.run_of, call.get
  local has_ended, SUCCESS, member_id, record_later = call.has_ended, call.SUCCESS, call.member_id, call.record_later
  -- Start a child in the place of a node. Returns what `start` returns.
  local function begin_child(run, n, record, frame, start)
    local id, fields = record[2], record[5]
    record[3] = math.max(1, number(run, 'until') - now)
    fields.parent, fields.root, fields.depth = frame, run.fields.root or run.id, number(run, 'depth') + 1
    local reply = start(unpack(record, 2))
    if reply == 1 then
      put(run, 'run:' .. n, id)
      redis.call('RPUSH', run.key .. ':children', id)
    end
    return reply
  end
  -- Return the child in the place of a node, if it has failed and can be retried: what has succeeded in it stays.
  local function child_to_retry(run, n, node)
    local child = node.dynamic and run_of(get(run, 'run:' .. n) or '')
    if not child or not has_ended(child) or get(child, 'state') == SUCCESS or get(child, 'undone') then return nil end
    return redis.call('EXISTS', definitions .. child.fields.def) == 1 and child
  end
  -- Retry the child in the place of a node. Returns whether there is one.
  local function retry_child(run, n, node, generation)
    local child = child_to_retry(run, n, node)
    if not child then return false end
    put(child, 'parent', member_id(run, n, generation))
    record_later('retry', child.id, 0, true)
    return true
  end
  call.begin_child, call.child_to_retry, call.retry_child = begin_child, child_to_retry, retry_child
end
