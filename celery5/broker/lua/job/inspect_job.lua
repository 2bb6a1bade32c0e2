-- Return all that Redis has of a job.
-- KEYS  1 stream of the queue
--       2 where its jobs are
--       3 result key of the job
--       4 scheduled jobs by time
--       5 their Commands
--       6 dead-letter queue
--       7 prefix of the waiting lists
--       8 progress of the job
--       9 workers that the job took down
--       10.. streams of its other lanes: high, low, handed
-- ARGV  1 consumer group
--       2 job id
-- Returns its place (as in the hash, or ''), its document, its message, the worker that has it (each may be ''), for how
-- many ms that has had it, when it is due in ms since 1970 (-1 each when that is not so), how many workers died with
-- it, the time in ms since 1970, how many are ahead of it in its waiting list (-1 when it is in none), the fields of its
-- progress while a worker has it (none where another worker has stored it), the last workers that it took down, and whether it
-- waits in its list for nothing but a worker with a slot: its task has no limit. A dead job's document is found in the dead-letter queue when it has expired.
local deaths = redis.call('LRANGE', KEYS[9], 0, -1)
local results = {'', redis.call('GET', KEYS[3]) or '', '', '', -1, -1, 0, now_ms(), -1, {}, deaths, 0}
local place = redis.call('HGET', KEYS[2], ARGV[2])
if not place then return results end
local kind, entry, lane = string.match(place, '^(.)([%d-]*)(%a?)')
results[1] = place
local function read(stream)
  local fields = fields_of(redis.call('XRANGE', stream, entry, entry)[1])
  results[3] = fields.job or ''
  return fields
end
if kind == 'S' or kind == 'V' then
  local stream = ({h = KEYS[10], l = KEYS[11], g = KEYS[12]})[lane] or KEYS[1]
  results[7] = tonumber(read(stream).deliveries) or 0
  local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)
  if not pending.err and pending[1] then
    results[4], results[5] = pending[1][2], pending[1][3]
    local progress = redis.pcall('HGETALL', KEYS[8])
    if not progress.err then results[10] = progress end
  end
elseif kind == 'X' then
  local document = read(KEYS[6]).document
  if results[2] == '' then results[2] = document or '' end
elseif kind == 'G' then
  results[3] = redis.call('HGET', KEYS[5], ARGV[2]) or ''
  local list = string.match(place, '^G%d* (.*)$')
  results[9] = redis.call('ZRANK', KEYS[7] .. 'line ' .. list, ARGV[2]) or -1
  for _, task in ipairs(redis.call('SMEMBERS', KEYS[7] .. 'unlimited')) do -- bound: the tasks of the queue
    if task == string.match(list, '^[^ ]*') then results[12] = 1 end
  end
else
  results[3] = redis.call('HGET', KEYS[5], ARGV[2]) or ''
  results[6] = math.floor(tonumber(redis.call('ZSCORE', KEYS[4], ARGV[2]) or -1))
end
return results
