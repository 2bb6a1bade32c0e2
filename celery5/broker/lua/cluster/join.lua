-- Let a worker join a queue: make the consumer groups that are missing, and take a lease.
-- KEYS  1 leases of its workers
--       2.. streams of its lanes: normal, high, low, handed
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 lease in ms
-- Returns 1.
for n = 2, #KEYS do -- bound: the streams of the queue
  -- Other lanes than the normal one exist since their first job.
  if n == 2 or redis.call('EXISTS', KEYS[n]) == 1 then
    local made = redis.pcall('XGROUP', 'CREATE', KEYS[n], ARGV[1], '0', 'MKSTREAM')
    if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
  end
end
redis.call('XGROUP', 'CREATECONSUMER', KEYS[2], ARGV[1], ARGV[2])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3], ARGV[2])
return 1
