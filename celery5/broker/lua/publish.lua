-- Put jobs on their queue, each of them once.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3.. result key of each job, in order
-- ARGV  1.. for each job: its id, its envelope
-- Gives how many were new: a job that is known already, or has ended already, is left alone.
local stream, jobs = KEYS[1], KEYS[2]
local new = 0
for n = 3, #KEYS do
  local id, envelope = ARGV[2 * n - 5], ARGV[2 * n - 4]
  if redis.call('HEXISTS', jobs, id) == 0 and redis.call('EXISTS', KEYS[n]) == 0 then
    local entry = redis.call('XADD', stream, '*', 'job', envelope)
    redis.call('HSET', jobs, id, 'S' .. entry)
    new = new + 1
  end
end
return new
