-- Let a worker join a queue: make the consumer groups that are missing, and take a lease. Losses of its name are repaired then.
-- KEYS  1 leases of its workers
--       2 what lost workers had begun
--       3.. streams of its lanes: normal, high, low, handed
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 lease in ms
-- Returns 1.
for n = 3, #KEYS do -- bound: the streams of the queue
  -- Other lanes than the normal one exist since their first job.
  if n == 3 or redis.call('EXISTS', KEYS[n]) == 1 then
    local made = redis.pcall('XGROUP', 'CREATE', KEYS[n], ARGV[1], '0', 'MKSTREAM')
    if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
  end
end
redis.call('XGROUP', 'CREATECONSUMER', KEYS[3], ARGV[1], ARGV[2])
local now = now_ms()
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[2])
-- That a loss is repaired is noted with it, so it stays so when this worker has left. A note that cannot be read stops no worker.
local lost, inbox = redis.pcall('HKEYS', KEYS[2]), inbox_of(ARGV[2])
for _, name in ipairs(lost.err and {} or lost) do -- bound: two hundred, which is how many are noted
  if inbox_of(name) == inbox then
    local is_read, work = pcall(cjson.decode, redis.call('HGET', KEYS[2], name))
    if is_read and type(work) == 'table' and not work.repaired_at then
      work.repaired_at = now
      redis.call('HSET', KEYS[2], name, cjson.encode(work))
    end
  end
end
return 1
