-- Let a worker join a queue: make the consumer group if it is missing, and take a lease.
-- KEYS  1 stream of the queue
--       2 leases of its workers
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 lease in ms
-- Gives 1.
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
redis.call('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[2])
return 1
