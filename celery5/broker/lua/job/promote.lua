-- Move scheduled jobs, retries and held jobs whose time has come to their queue.
-- KEYS  1 scheduled jobs by time
--       2 their Commands
--       3 stream of the queue
--       4 where its jobs are; the lists of foreign jobs are named after it (lib/foreign.lua)
--       5 stream of its lane `high`
--       6 stream of its lane `low`
--       7 how many jobs wait at limits
--       8 prefix of the waiting lists
-- ARGV  1 how many at most
--       2 channel that wakes workers
-- Returns how many were moved, in how many ms the next one falls due (-1 when none waits), and how many records wait for
-- advance.lua: a run of a workflow that is due is noted for it, on lists that are named after `jobs`. The place of a held job says
-- how many workers died with it before (H, then the number): that goes back with it. The letter of its lane comes
-- last in its place, if it is not the normal one. A job that waits at a limit is due when it expires.
local LATE = 1000 -- ms
local due, waiting, jobs = KEYS[1], KEYS[2], KEYS[4]
local at = use_keys {due = due, held = KEYS[7], prefix = KEYS[8]}
local streams = {[''] = KEYS[3], h = KEYS[5], l = KEYS[6]}
local now = now_ms()
local found, held = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[1]), {}
for n = 1, #found, 2 do -- bound: ARGV 1
  local id = found[n]
  local command, place = redis.call('HGET', waiting, id), redis.call('HGET', jobs, id) or ''
  local list = string.match(place, '^G%d* (.*)$')
  if list then
    leave_list(at, id, list)
    expires_no_more(at, id)
  else
    redis.call('ZREM', due, id)
    if string.sub(place, 1, 1) == 'H' then held[#held + 1] = id end
  end
  redis.call('HDEL', waiting, id)
  if command then
    local deaths, lane = string.match(place, '^[HG](%d+)'), string.match(place, '^%u%d*([hl])$') or ''
    local stream, entry = streams[lane], nil
    -- No worker reads a lane before its first job.
    if lane ~= '' and redis.call('EXISTS', stream) == 0 then redis.call('PUBLISH', ARGV[2], 'lane') end
    -- Its entry tells since when it could have run, unless no worker moved it then.
    local since = not list and now - found[n + 1] > LATE and string.format('%.0f', found[n + 1])
    if since then
      entry = redis.call('XADD', stream, '*', 'job', command, 'deliveries', deaths or 0, 'since', since)
    elseif deaths then
      entry = redis.call('XADD', stream, '*', 'job', command, 'deliveries', deaths)
    else
      entry = redis.call('XADD', stream, '*', 'job', command)
    end
    redis.call('HSET', jobs, id, 'S' .. entry .. lane)
  else
    redis.call('HDEL', jobs, id)
    note_end(jobs, id, 'LOST', '')
  end
end
write(at)
leave_foreign(jobs, held)
local runs, records = jobs .. ':runs', jobs .. ':ended'
for _, run in ipairs(redis.call('ZRANGEBYSCORE', runs, '-inf', now, 'LIMIT', 0, ARGV[1])) do -- bound: ARGV 1
  redis.call('RPUSH', records, cmsgpack.pack({'due', run}))
  redis.call('ZADD', runs, now + 60000, run) -- advance.lua sets the right time
end
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local first_run = redis.call('ZRANGE', runs, 0, 0, 'WITHSCORES')
local next_due = math.min(tonumber(first[2] or math.huge), tonumber(first_run[2] or math.huge))
return {#found / 2, next_due == math.huge and -1 or math.max(0, math.ceil(next_due - now)), redis.call('LLEN', records)}
