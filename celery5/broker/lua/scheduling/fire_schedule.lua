-- Move a schedule from the expected state to its next one, and publish the jobs that this makes due: all of it or
-- nothing. If several Schedulers try, one succeeds.
-- KEYS  1 schedules of the queue
--       2 when to look at each of them
--       3 stream of the jobs' lane
--       4 where its jobs are
--       5 the live job of each key
--       6.. for each job, in order: its result key, and the key of its window
-- ARGV  1 the schedule's name
--       2 its state as it was expected ('' for none)
--       3 its state from now on ('' for none); the same when only the time changes
--       4 when to look at it next, in ms since 1970 ('' for never)
--       5 channel on which Schedulers are notified ('' for none)
--       6 channel that wakes workers
--       7 letter of the lane, '' for the normal one
--       8.. for each job: its id, its Command, what its key is remembered under ('' for none), its `unique_for` in ms
--           (0 for none)
-- Returns 1 when it was done, now or by an earlier call with the same arguments, and 0 when the state was different. A job that is known
-- already is left alone, and one whose key another job holds is not sent.
local schedules, times, stream, jobs, unique = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local name, expected, new, look, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local now_there = redis.call('HGET', schedules, name) or ''
if now_there == new then
  if expected == new and new ~= '' and look ~= '' then redis.call('ZADD', times, look, name) end
  return 1
end
if now_there ~= expected then return 0 end
local lane = ARGV[7]
local is_new = is_new_lane(stream, lane)
for n = 6, #KEYS, 2 do -- bound: the jobs of one schedule
  local at = 8 + 4 * (n - 6) / 2
  local id, command, lock, span = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local known = redis.call('HEXISTS', jobs, id) == 1 or redis.call('EXISTS', KEYS[n]) == 1
  local is_taken = lock ~= '' and (redis.call('EXISTS', KEYS[n + 1]) == 1 or find_holder(unique, jobs, lock))
  if not known and not is_taken then
    send(stream, jobs, lane, id, command)
    if is_new then redis.call('PUBLISH', ARGV[6], 'lane') end
    is_new = false
    if lock ~= '' then redis.call('HSET', unique, lock, id) end
    if span ~= '0' then redis.call('SET', KEYS[n + 1], id, 'PX', span) end
  end
end
if new == '' then redis.call('HDEL', schedules, name) else redis.call('HSET', schedules, name, new) end
if look == '' then redis.call('ZREM', times, name) else redis.call('ZADD', times, look, name) end
if channel ~= '' then redis.call("PUBLISH", channel, name) end -- on all nodes of a cluster
return 1
