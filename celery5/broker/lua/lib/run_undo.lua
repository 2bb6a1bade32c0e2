-- Run undo: a part of advance.lua. Counts what is undone of a run that fails. `undoing` has the runs of which that is not finished: they
-- stop, are undone, or an undo job of theirs is dead.
local LOOK = 60000 -- ms until a run that stops is looked at again
local function is_undo(node) return node.k == 'job' and node.h and node.name == 'undo' end
-- A run that is being undone has the state `undoing`, and that in which it will end.
local function is_undoing(run) return string.find(get(run, 'state'), UNDOING, 1, true) == 1 end
local function has_ended(run) return get(run, 'state') ~= LIVE and not is_undoing(run) end
-- Return whether a run that stops waits for jobs: those that run, and those that were held. They may have been replayed since.
local function is_busy(run) return number(run, 'active') > 0 or number(run, 'held') > 0 end
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
