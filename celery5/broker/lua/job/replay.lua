-- Put dead jobs back on their queue, each by itself: the call that removes it from the dead-letter queue replays it.
-- KEYS  1 stream of the jobs' lane
--       2 where its jobs are
--       3 dead-letter queue
--       4 the live job of each key
--       5.. result key of each job, in order
-- ARGV  1 channel that wakes workers
--       2 letter of the lane, '' for the normal one
--       3.. for each job: its entry in the dead-letter queue, its id, its fresh message, what its key is remembered
--           under or ''
-- Returns for each job: 1 replayed; 0 it was not in the dead-letter queue any more; -1 another live job has its key; -2 a job of its
-- id is alive. A job that is not replayed stays dead. Safe to repeat. A replayed job's old document goes, so that no client
-- gets it for the new run.
local stream, jobs, dead, unique = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local results, lane = {}, ARGV[2]
local is_new = is_new_lane(stream, lane)
for n = 5, #KEYS do -- bound: the jobs of this call
  local at = 4 * (n - 5) + 3
  local dead_entry, id, message, lock = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local place, holder = redis.call('HGET', jobs, id), lock ~= '' and find_holder(unique, jobs, lock)
  if place and string.sub(place, 1, 1) ~= 'X' then
    results[#results + 1] = #redis.call('XRANGE', dead, dead_entry, dead_entry) == 1 and -2 or 0
  elseif holder and holder ~= id then
    results[#results + 1] = #redis.call('XRANGE', dead, dead_entry, dead_entry) == 1 and -1 or 0
  elseif remove_dead(dead, dead_entry) == 0 then
    results[#results + 1] = 0
  else
    send(stream, jobs, lane, id, message)
    if is_new then redis.call('PUBLISH', ARGV[1], 'lane') end
    is_new = false
    redis.call('DEL', KEYS[n])
    if lock ~= '' then redis.call('HSET', unique, lock, id) end
    results[#results + 1] = 1
  end
end
if redis.call('XLEN', dead) == 0 then redis.call('DEL', dead, dead .. ':causes') end
return results
