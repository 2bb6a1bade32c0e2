-- Return where a job is.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 result key of the job
--       4.. streams of its other lanes: high, low, handed
-- ARGV  1 consumer group
--       2 job id
-- Returns its place (as in the hash, or ''), the worker that has it (or ''), and its document (or '').
local place = redis.call('HGET', KEYS[2], ARGV[2])
local document = redis.call('GET', KEYS[3]) or ''
if not place then return {'', '', document} end
local kind = string.sub(place, 1, 1)
if kind == 'S' or kind == 'V' then -- V: revoked, and a worker still has it
  local entry, lane = string.match(place, '^.([%d-]*)(%a?)')
  local stream = ({h = KEYS[4], l = KEYS[5], g = KEYS[6]})[lane] or KEYS[1]
  local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)
  if not pending.err and pending[1] then return {place, pending[1][2], ''} end
  return {place, '', ''}
end
return {place, '', document}
