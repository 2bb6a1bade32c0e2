-- Renew a worker's lease, and return what else a worker has to do on this queue.
-- KEYS  1 leases of its workers; that they were compared with the consumers is noted in a key named after it
--       2 scheduled jobs by time
--       3 how many jobs wait at limits
--       4 where its jobs are; lists of runs of workflows are named after it
--       5.. streams of its lanes: normal, high, low, handed
-- ARGV  1 this worker's name
--       2 lease in ms; when its sidecar renews it, since its event loop does not, with a part of a ms that says for how long
--       3 consumer group
--       4 ms of the lease of an idle worker, which renews it again before it begins a job; 0 if the worker may hold jobs
-- Returns whether the worker still had its lease, how many others have let theirs lapse, in how
-- many ms the next scheduled job falls due (-1 when none waits), and in how many ms the next lease of another would
-- lapse (-1 when there is none), and the letters of the lanes beside the normal one that have ever had a job. These can be
-- read from now on: putting the first job on a lane creates no group. Then the tasks whose jobs wait at limits,
-- the time in ms: what a worker decides from this answer, it decides as of that time; how many records of runs
-- wait for advance.lua, and how many entries are in the outbox of runs; how many hold jobs without a lease, as far as this
-- call has looked for them; how many workers the queue has; and for how many ms heartbeats of its workers have come
-- without a gap.
-- Two keys beside the leases: `:idle`, the leases renewed by ARGV 4, and `:steady`, the time since which there is no gap.
local leases, due, lanes = KEYS[1], KEYS[2], ''
local now = now_ms()
local mine = redis.call('ZSCORE', leases, ARGV[1])
-- 0: it has left (leave.lua). Below: it is being recovered.
if not mine or tonumber(mine) <= 0 then return {0, 0, -1, -1, '', {}, now, 0, 0, 0, 0, 0} end
-- The call of a sidecar may run late, since the server was frozen. If the worker has renewed its lease meanwhile, it is not silent.
local length = tonumber(ARGV[2])
local silent_for = math.floor(length % 1 * 4096 + 0.5) - 1
local renewed_at = tonumber(mine) - math.floor(length)
-- Silence is told in whole seconds, rounded down.
local is_refuted = silent_for >= 0 and tonumber(mine) % 1 == 0 and renewed_at > now - math.max(silent_for, 1) * 1000
redis.call('ZREM', leases, '') -- removes nothing: Redis does it when its memory is full, and so what follows, too
local idle, idle_lease = leases .. ':idle', tonumber(ARGV[4])
if idle_lease > 0 then
  redis.call('ZADD', leases, now + idle_lease, ARGV[1])
  redis.pcall('ZADD', idle, now + idle_lease, ARGV[1])
  redis.call('PEXPIRE', idle, idle_lease)
else
  -- The lease of an idle worker is longer, so it does not say when it was renewed.
  local was_idle = redis.pcall('ZREM', idle, ARGV[1]) == 1
  if is_refuted and not was_idle then length = math.floor(length) end
  redis.call('ZADD', leases, string.format('%.4f', now + length), ARGV[1])
end
-- It expires in an outage of Redis, or when its clock is set: leases of live workers have ended then.
local since = redis.pcall('GET', leases .. ':steady')
local steady = math.min(type(since) == 'string' and tonumber(since) or now, now)
redis.call('SET', leases .. ':steady', string.format('%.0f', steady), 'PX', math.ceil(ARGV[2] * 0.6))
local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
-- A read that was under way while its worker was recovered may have been served later: jobs without a live worker. To look
-- for them costs something for each worker, so one of them does it for all, and the more there are, the less often.
local strays, consumers = 0, 0
local checked = leases .. ':checked'
local is_my_turn = redis.call('SET', checked, '', 'NX', 'PX', math.ceil(ARGV[2] / 4))
local are_idle = is_my_turn and redis.call('EXISTS', idle) == 1
if are_idle then redis.pcall('ZREMRANGEBYSCORE', idle, '-inf', now) end
local function look(stream)
  if not is_my_turn then return 0 end
  local count, members, held = 0, 0, redis.pcall('XPENDING', stream, ARGV[3])
  for _, holder in ipairs(not held.err and held[4] or {}) do -- bound: the workers of the queue that have jobs
    if not redis.call('ZSCORE', leases, holder[1]) then
      count = count + 1
    elseif are_idle and redis.pcall('ZREM', idle, holder[1]) == 1 then
      -- A job was given to an idle worker. One that lives renews its lease at once.
      redis.call('ZADD', leases, 'XX', 'LT', now + math.ceil(ARGV[2] / 2), holder[1])
    end
  end
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, one in ipairs(groups.err and {} or groups) do -- bound: the consumer groups of a stream, one
    members = math.max(members, to_table(one).consumers)
  end
  consumers = consumers + members
  -- Valkey creates an empty consumer again when a blocked read ends whose worker others have recovered. Each consumer
  -- takes 10 us to check. If there are many, they are checked only when there are more of them than workers.
  if members <= 50 or members > redis.call('ZCARD', leases) then
    for _, consumer in ipairs(consumers_of(stream, ARGV[3])) do -- bound: the workers of the queue
      if consumer.pending == 0 and not redis.call('ZSCORE', leases, consumer.name) then
        redis.call('XGROUP', 'DELCONSUMER', stream, ARGV[3], consumer.name)
      end
    end
  end
  return count
end
strays = look(KEYS[5])
look(KEYS[4] .. ':to-send') -- workers take its entries over by themselves
for n = 6, 8 do -- bound: three lanes
  if redis.call('EXISTS', KEYS[n]) == 1 then
    redis.pcall('XGROUP', 'CREATE', KEYS[n], ARGV[3], '0')
    lanes = lanes .. string.sub('hlg', n - 5, n - 5)
    strays = strays + look(KEYS[n])
  end
end
if consumers > 0 then redis.call('PEXPIRE', checked, math.ceil(ARGV[2] / 4) + consumers) end
local lapse = -1
local standing = redis.call('ZRANGEBYSCORE', leases, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
for n = 1, #standing, 2 do -- bound: two leases
  if standing[n] ~= ARGV[1] then
    lapse = math.ceil(standing[n + 1] - now)
    break
  end
end
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local first_run = redis.call('ZRANGE', KEYS[4] .. ':runs', 0, 0, 'WITHSCORES')
local next_due = math.min(tonumber(first[2] or math.huge), tonumber(first_run[2] or math.huge))
local due_in = next_due == math.huge and -1 or math.max(0, math.ceil(next_due - now))
return {1, lapsed, due_in, lapse, lanes, redis.call('HKEYS', KEYS[3]), now, redis.call('LLEN', KEYS[4] .. ':ended'),
  redis.call('XLEN', KEYS[4] .. ':to-send'), strays, redis.call('ZCARD', leases), now - steady}
