-- Settle a portion of records that this worker has claimed for the archive: it is archived, or to be tried later; or claim
-- it for longer.
-- KEYS  1 map of the stream
--       2 who takes the records
--       3 the records of the partition that wait
-- ARGV  1 partition
--       2 this worker
--       3 last id of the portion
--       4 archived, failed or renewed
--       5 ms until others may claim it, unless it is archived
-- Returns 1, or 0 when the worker does not have this portion any more: then nothing is changed.
local map, takers, waiting = unpack(KEYS)
local partition, worker, outcome = ARGV[1], ARGV[2], ARGV[4]
local _, last, failures, owner = string.match(redis.call('HGET', takers, partition) or '', '^(%d+) (%S+) (%d+) (.*)$')
if owner ~= worker or last ~= ARGV[3] then return 0 end
if outcome == 'archived' then
  local ms, n = split_id(last)
  redis.call('HINCRBY', map, 'archive-taken', redis.call('XTRIM', waiting, 'MINID', make_id(ms, n + 1)))
  if redis.call('XLEN', waiting) > 0 then
    redis.call('HSET', takers, partition, '')
  else
    redis.call('DEL', waiting)
    redis.call('HDEL', takers, partition)
  end
  return 1
end
if outcome == 'failed' then failures, owner = failures + 1, '' end
redis.call('HSET', takers, partition, string.format('%d %s %d %s', now_ms() + ARGV[5], last, failures, owner))
return 1
