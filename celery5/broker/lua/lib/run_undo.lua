-- Run undo: a part of advance.lua. Counts what is undone of a run that fails. `undoing` has the runs of which that is not finished: they
-- stop, are undone, or an undo job of theirs is dead.
local LOOK = 60000 -- ms until a run that stops is looked at again
local function is_undo(node) return node.k == 'job' and node.h and node.name == 'undo' end
-- A run that is being undone has the state `undoing`, and that in which it will end.
local function is_undoing(run) return string.find(get(run, 'state'), UNDOING, 1, true) == 1 end
local function has_ended(run) return get(run, 'state') ~= LIVE and not is_undoing(run) end
-- Note that a run stops, from now on; of a child, that the run does that it is a part of.
local function note_undoing(run)
  redis.call('ZADD', undoing, 'NX', now, run.fields.root or run.id)
  redis.call('ZREMRANGEBYRANK', undoing, 0, -KEPT - 1)
  for _, id in ipairs(redis.call('ZRANGE', undoing, 0, 4)) do -- bound: five
    if id ~= run.id and redis.call('EXISTS', prefix .. id) == 0 then redis.call('ZREM', undoing, id) end -- it has expired
  end
  redis.call('PEXPIRE', undoing, math.max(tonumber(ttl), 60 * LOOK))
end
-- Return whether a run that stops waits for jobs: those that run, and those that were held. They may have been replayed since.
local function is_busy(run) return number(run, 'active') > 0 or number(run, 'held') > 0 end
local function begin_undo(run)
  local count = redis.call('LLEN', run.key .. ':undo')
  add(run, 'undos', count)
  note_undoing(run)
end
-- Forget a run that has ended, when none of its undo jobs is dead any more.
local function end_undo(run)
  run = root_of(run) or run
  if not is_undoing(run) and number(run, 'undo_bad') <= number(run, 'undo_purged') then redis.call('ZREM', undoing, run.id) end
end
-- Note that a step is to be undone that has succeeded when its run was not live any more.
local function note_late_success(run)
  local state = get(run, 'state')
  if state ~= LIVE and state ~= SUCCESS then add(run, 'undos', 1) end
end
-- Have what is done in a run undone when it fails: a node, or `run` and the node in whose place a child is.
local function undo_later(run, what)
  redis.call('RPUSH', run.key .. ':undo', what)
  note_late_success(run)
end
-- Count an undo job that has ended, and what it was before: `failed` when its dead letter was replayed, or purged.
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
