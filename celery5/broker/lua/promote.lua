-- Move scheduled jobs, retries and held jobs whose time has come to their queue.
-- KEYS  1 scheduled jobs by time
--       2 their envelopes
--       3 stream of the queue
--       4 where its jobs are
-- ARGV  1 how many at most
-- Gives how many were moved, and in how many ms the next one falls due (-1 when none waits). The place of a held job says
-- how many workers went down with it before (H, then the number): that goes back with it.
local due, waiting, stream, jobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, ARGV[1])
for _, id in ipairs(ids) do
  local envelope = redis.call('HGET', waiting, id)
  redis.call('ZREM', due, id)
  redis.call('HDEL', waiting, id)
  if envelope then
    local deaths = string.match(redis.call('HGET', jobs, id) or '', '^H(%d+)$')
    local entry
    if deaths then
      entry = redis.call('XADD', stream, '*', 'job', envelope, 'deliveries', deaths)
    else
      entry = redis.call('XADD', stream, '*', 'job', envelope)
    end
    redis.call('HSET', jobs, id, 'S' .. entry)
  else
    redis.call('HDEL', jobs, id)
  end
end
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
if not first[2] then return {#ids, -1} end
return {#ids, math.max(0, math.ceil(first[2] - now))}
