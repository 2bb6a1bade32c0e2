-- Run nodes: a part of advance.lua. What the end of a node means for those that depend on it, and for the run.
local function later(run, what, n, is_bad) run.work[#run.work + 1] = {what, n, is_bad} end
-- Count a node for those that depend on it.
local function feed_all(run, node, is_bad)
  for _, after in ipairs(node.f or {}) do later(run, 'feed', after, is_bad) end -- bound: the feeds of a node, 100 at most
end
-- Return whether people count a node: of a map they count the members.
local function is_counted(node) return not node.h and node.k ~= 'map' end
-- Keep the value of a node that has succeeded. It is undone if the run fails, whether or not the run waited for it.
local function keep_value(run, n, node, value)
  put(run, 'value:' .. n, node.o == 'continue' and node.k ~= 'map' and '{"state":"SUCCESS","value":' .. value .. '}' or value)
  if not node.u then return end
  redis.call('RPUSH', run.key .. ':undo', n)
  note_late_success(run)
end
local function succeed(run, n, node, generation, value)
  set_state(run, n, 'done', generation)
  keep_value(run, n, node, value)
  if is_counted(node) then add(run, 'done', 1) end
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
  note_failure(run, n, node, generation, state, document, policy == 'fail' or policy == 'apart' or policy == 'hold')
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
    note_error(run, failure_of(run, n, node, generation, state, document), n)
    feed_all(run, node, true)
  else
    fail_run(run, FAILED, failure_of(run, n, node, generation, state, document), n)
  end
end
