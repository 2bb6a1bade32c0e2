-- Put jobs on their queue, or keep them until their time, unless another job of the same task and key is in the way:
-- one that is alive, or one that was sent so lately that its `unique_for` is not over.
-- KEYS  1 stream of the jobs' lane
--       2 where its jobs are
--       3 scheduled jobs by time
--       4 their Commands
--       5 the live job of each key
--       6.. for each job, in order: its result key, and the key of its window
-- ARGV  1 channel that wakes workers
--       2 letter of the lane, '' for the normal one
--       3.. for each job: its id, its Command, its time ('' for now, ms since 1970, or '+' and ms from now), what its
--           key is remembered under ('' for none), and its `unique_for` in ms (0 for none)
-- Returns for each job the id of the one that holds its place: its own, or that of the one in the way. A job that is known
-- already, or has ended already, is left alone and its own id is returned: so the call may be repeated.
local stream, jobs, due, waiting, unique = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now = now_ms()
local holders, earliest, lane = {}, nil, ARGV[2]
local is_new = is_new_lane(stream, lane)
for n = 6, #KEYS, 2 do -- bound: the jobs of this call, 200 at most
  local at = 3 + 5 * (n - 6) / 2
  local id, command, when, lock, span = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local holder = id
  -- A window that says its own id: it was sent, has ended, and its result is gone.
  local known = redis.call('HEXISTS', jobs, id) == 1 or redis.call('EXISTS', KEYS[n]) == 1
  if not known and not (lock ~= '' and redis.call('GET', KEYS[n + 1]) == id) then
    holder = lock ~= '' and (redis.call('GET', KEYS[n + 1]) or find_holder(unique, jobs, lock)) or id
    if holder == id then
      if when == '' then
        send(stream, jobs, lane, id, command)
        if is_new then redis.call('PUBLISH', ARGV[1], 'lane') end
        is_new = false
      else
        when = parse_time(when, now)
        keep_until(due, waiting, jobs, id, command, 'D' .. lane, when)
        if not earliest or when < earliest then earliest = when end
      end
      if lock ~= '' then redis.call('HSET', unique, lock, id) end
      if span ~= '0' then redis.call('SET', KEYS[n + 1], id, 'PX', span) end
    end
  end
  holders[#holders + 1] = holder
end
wake_if_first(due, ARGV[1], earliest)
return holders
