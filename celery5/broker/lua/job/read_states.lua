-- Return where jobs of one queue are, and what they have reported of their progress.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 stream of its high lane
--       4 of its low lane
--       5 of the jobs that a worker got from a waiting list
--       6.. for each job its result key, then its progress
-- ARGV  1 consumer group
--       2.. job ids
-- Returns for each job its place (as in the hash, or ''), the worker that has it (or ''), 1 when it has a document, else
-- 0, and the fields of its progress while a worker has it (none where another worker has stored it).
local streams = {h = KEYS[3], l = KEYS[4], g = KEYS[5]}
local states = {}
for n = 2, #ARGV do -- bound: 100 in one call at most
  local document, reported = KEYS[2 + 2 * n], KEYS[3 + 2 * n]
  local place = redis.call('HGET', KEYS[2], ARGV[n]) or ''
  local state = {place, '', redis.call('EXISTS', document), {}}
  local kind, entry, lane = string.match(place, '^([SV])([%d-]*)(%a?)')
  if kind then
    local pending = redis.pcall('XPENDING', streams[lane] or KEYS[1], ARGV[1], entry, entry, 1)
    if not pending.err and pending[1] then
      state[2] = pending[1][2]
      if redis.call('HGET', reported, 'worker') == state[2] then state[4] = redis.call('HGETALL', reported) end
    end
  end
  states[n - 1] = state
end
return states
