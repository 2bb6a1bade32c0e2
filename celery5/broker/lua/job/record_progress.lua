-- Store what running jobs have reported of their progress, keep what others have reported, and delete it for jobs that
-- have ended, all of one queue.
-- KEYS  1 leases of the queue's workers
--       2.. progress of each job: first those with a new report, then those to keep, then those that have ended
-- ARGV  1 name of the worker that runs or has run them
--       2 ttl in ms
--       3 how many jobs have a new report
--       4 how many are to keep
--       5.. for each job with a new report: done, total ('' when unknown), note, attempt
-- Returns 1, or 0 when the worker has lost its lease: then nothing was done. What another worker has stored of a job
-- that has ended here is left alone: the job runs there now.
local me, ttl, reported, kept = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not has_lease(KEYS[1], me) then return 0 end
local now = now_ms()
for n = 1, reported do -- bound: the jobs that run in this worker, 256 in one call at most
  local key, at = KEYS[1 + n], 1 + 4 * n
  redis.call('HSET', key, 'done', ARGV[at], 'total', ARGV[at + 1], 'note', ARGV[at + 2], 'attempt', ARGV[at + 3],
    'at', now, 'worker', me)
  redis.call('PEXPIRE', key, ttl)
end
for n = 1 + reported, reported + kept do -- bound: 256 in one call at most
  redis.call('PEXPIRE', KEYS[1 + n], ttl)
end
for n = 1 + reported + kept, #KEYS - 1 do -- bound: 256 in one call at most
  local key = KEYS[1 + n]
  if redis.call('HGET', key, 'worker') == me then redis.call('DEL', key) end
end
return 1
