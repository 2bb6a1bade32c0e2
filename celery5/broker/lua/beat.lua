-- Renew a worker's lease, and tell what else wants doing on this queue.
-- KEYS  1 leases of its workers
--       2 scheduled jobs by time
-- ARGV  1 this worker's name
--       2 lease in ms
-- Gives whether the worker still had its lease, how many others have let theirs lapse, and in how many ms the next
-- scheduled job falls due (-1 when none waits).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local mine = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not mine or tonumber(mine) < 0 then return {0, 0, -1} end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
local lapsed = redis.call('ZCOUNT', KEYS[1], '-inf', now)
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if not first[2] then return {1, lapsed, -1} end
return {1, lapsed, math.max(0, math.ceil(first[2] - now))}
