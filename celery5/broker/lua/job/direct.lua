-- Put a job on its queue and into the pending list of one worker, before any worker reads it.
-- KEYS  1 stream of the job's lane
--       2 where its jobs are
--       3 result key of the job
-- ARGV  1 consumer group
--       2 the worker
--       3 the job's id
--       4 its Command
--       5 the most jobs that may wait before it
--       6 letter of the lane, '' for the normal one
--       7 channel that wakes workers
-- Returns nothing when too many wait before it; else what the worker has now, as XREADGROUP does: the job, and those that
-- waited before it. A job that is known already, or has ended, is left alone, also when the call is repeated: then there
-- is none, and what the worker has is in its pending list.
local stream, jobs, group, worker, id = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
if redis.call('HEXISTS', jobs, id) == 1 or redis.call('EXISTS', KEYS[3]) == 1 then return {} end
if ARGV[6] ~= '' then
  if redis.call('EXISTS', stream) == 0 then redis.call('PUBLISH', ARGV[7], 'lane') end -- no worker reads this lane yet
  -- The first job on a lane creates no group: a worker's heartbeat does.
  redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
end
local waiting = redis.call('XLEN', stream) - redis.call('XPENDING', stream, group)[1]
if waiting > tonumber(ARGV[5]) then return false end
local entry = redis.call('XADD', stream, '*', 'job', ARGV[4])
redis.call('HSET', jobs, id, 'S' .. entry .. ARGV[6])
local read = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', waiting + 1, 'STREAMS', stream, '>')
return read and read[1][2] or {}
