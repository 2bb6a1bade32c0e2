-- Put jobs of a task with fair keys directly into their waiting lists, not on the stream: jobs of other keys that were
-- sent before them would delay them there, until a worker has read those.
-- KEYS  1 where the queue's jobs are
--       2 Commands of waiting jobs
--       3 scheduled jobs by time
--       4 how many jobs wait
--       5 prefix of the waiting lists
--       6.. result key of each job, in order
-- ARGV  1 channel that notifies workers of jobs that may run
--       2 letter of the lane of their priority, '' for the normal one
--       3.. for each job: its id, its Command, its waiting list, when it expires (ms since 1970, or '')
-- Returns how many were new: a job that is known already, or has ended already, is left alone.
-- All jobs are looked up and written with as few commands as possible, as in publish.lua.
local at = use_keys {jobs = KEYS[1], waiting = KEYS[2], due = KEYS[3], held = KEYS[4], prefix = KEYS[5]}
local ids, places, commands, expiring, lists, tasks, met = {}, {}, {}, {}, {}, {}, {}
for n = 3, #ARGV, 4 do ids[#ids + 1] = ARGV[n] end -- bound: the jobs of this call
local known, some_ended = redis.call('HMGET', at.jobs, unpack(ids)), redis.call('EXISTS', unpack(KEYS, 6)) > 0
-- The score as in admit.lua, by microseconds: later jobs have higher scores. It is exact, since it is below 2^53.
local time, level = redis.call('TIME'), ({h = 0, l = 2})[ARGV[2]] or 1
local now = time[1] * 1e6 + time[2] + level * 2e15
for n, id in ipairs(ids) do -- bound: the jobs of this call
  local command, list, expires = ARGV[4 * n], ARGV[4 * n + 1], ARGV[4 * n + 2]
  if not known[n] and not met[id] and not (some_ended and redis.call('EXISTS', KEYS[n + 5]) == 1) then
    met[id] = true
    if not lists[list] then
      lists[list] = {}
      lists[#lists + 1] = list
      tasks[string.match(list, '^[^ ]*')] = true
    end
    local scored = lists[list]
    scored[#scored + 1], scored[#scored + 2] = string.format('%.0f', now + n), id
    places[#places + 1], places[#places + 2] = id, 'G ' .. list
    commands[#commands + 1], commands[#commands + 2] = id, command
    if expires ~= '' then expiring[#expiring + 1], expiring[#expiring + 2] = expires, id end
  end
end
if #places == 0 then return 0 end
add_to_lists(at, lists)
redis.call('HSET', at.waiting, unpack(commands))
redis.call('HSET', at.jobs, unpack(places))
if #expiring > 0 then
  redis.call('ZADD', at.due, unpack(expiring))
  count(at, at.held, ' expires', #expiring / 2)
end
write(at)
for task in pairs(tasks) do redis.call('PUBLISH', ARGV[1], task) end -- bound: the jobs of this call
return #places / 2
