-- Causes: how many dead jobs each cause has, counted where jobs die and where they leave the dead-letter queue: a part of the
-- scripts that do, and note the end of the job. `letters` is that queue; beside it stands the hash `<letters>:causes`: for each cause `count <cause>`, and as
-- entries of the queue `first <cause>` and `last <cause>`. A cause is the id of a group, which whoever settles the job computes, or what that is made of (recover.lua).
local MOST_CAUSES = 1000 -- further ones are counted together
local CAUSES_KEPT = 90 * 86400000 -- ms after the last death: then a look at the dead letters tells what is left
-- Put a job into the dead-letter queue. Returns its entry.
local function add_dead(letters, message, document, cause)
  if cause == '' then return redis.call('XADD', letters, '*', 'job', message, 'document', document) end
  local causes = letters .. ':causes'
  local is_known = redis.call('HEXISTS', causes, 'count ' .. cause) == 1
  if not is_known and redis.call('HLEN', causes) >= 3 * MOST_CAUSES then
    cause = 'others'
    is_known = redis.call('HEXISTS', causes, 'count others') == 1
  end
  local entry = redis.call('XADD', letters, '*', 'job', message, 'document', document, 'cause', cause)
  redis.call('HINCRBY', causes, 'count ' .. cause, 1)
  if not is_known then redis.call('HSET', causes, 'first ' .. cause, entry) end
  redis.call('HSET', causes, 'last ' .. cause, entry)
  redis.call('PEXPIRE', causes, CAUSES_KEPT)
  return entry
end
-- Remove an entry from the dead-letter queue. Returns whether it was there.
local function remove_dead(letters, entry)
  local found = redis.call('XRANGE', letters, entry, entry)[1]
  if not found then return 0 end
  local cause
  for n = 1, #found[2], 2 do -- bound: the fields of an entry, as its sender wrote them
    if found[2][n] == 'cause' then cause = found[2][n + 1] end
  end
  if cause and redis.call('HINCRBY', letters .. ':causes', 'count ' .. cause, -1) <= 0 then
    redis.call('HDEL', letters .. ':causes', 'count ' .. cause, 'first ' .. cause, 'last ' .. cause)
  end
  return redis.call('XDEL', letters, entry)
end
