-- Run undo: a part of advance.lua. Says which nodes undo others, whether a run is being undone, and what is to be undone.
local function add_run_undo(call)
  local get, UNDOING, LIVE, number, SUCCESS, add = call.get, call.UNDOING, call.LIVE, call.number, call.SUCCESS, call.add
  local KEPT = 1000 -- runs that have ended lately
  local LOOK_INTERVAL = 60000 -- ms until a run that stops is looked at again
  local function is_undo(node) return node.k == 'job' and node.h and node.name == 'undo' end
  -- A run that is being undone has the state `undoing`, and that in which it will end.
  local function is_undoing(run) return string.find(get(run, 'state'), UNDOING, 1, true) == 1 end
  local function has_ended(run) return get(run, 'state') ~= LIVE and not is_undoing(run) end
  -- Return whether a run that stops waits for jobs: those that run, and those that were held. They may have been replayed since.
  local function is_busy(run) return number(run, 'active') > 0 or number(run, 'held') > 0 end
  -- Have a step that has succeeded undone when its run fails. `what` is its node; or `run` and its node, for the child in its place.
  local function undo_later(run, what)
    redis.call('RPUSH', run.key .. ':undo', what)
    local state = get(run, 'state')
    if state ~= LIVE and state ~= SUCCESS then add(run, 'undos', 1) end -- the run fails already
  end
  call.KEPT, call.LOOK_INTERVAL, call.is_undo, call.is_undoing, call.has_ended = KEPT, LOOK_INTERVAL, is_undo, is_undoing, has_ended
  call.is_busy, call.undo_later = is_busy, undo_later
end
