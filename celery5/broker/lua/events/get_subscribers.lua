-- Return the subscriptions, unless their state is known to the caller. Retire those that were not declared in time.
-- KEYS  1 registry of subscriptions
--       2 until when each of them counts, in ms
-- ARGV  1 which state of the registry is known, '' for none
-- Returns which state it has now, the registry as name, value, name, value (nothing when that is known), and the names of
-- those that were retired.
local registry, subscribed = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = redis.call('ZRANGEBYSCORE', subscribed, '-inf', now, 'LIMIT', 0, 100)
for _, name in ipairs(gone) do -- bound: 100 subscriptions
  redis.call('HDEL', registry, name)
  redis.call('ZREM', subscribed, name)
end
if #gone > 0 and redis.call('EXISTS', registry) == 1 then
  redis.call('HSET', registry, '', time[1] .. string.format('%06d', time[2]))
end
local state = redis.call('HGET', registry, '') or '0'
if state == ARGV[1] then return {state, {}, gone} end
return {state, redis.call('HGETALL', registry), gone}
