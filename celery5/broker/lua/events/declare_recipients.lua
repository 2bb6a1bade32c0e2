-- Record which Data Sinks take the documents of which tasks, for jobs that end outside of a worker: those that
-- took their worker down, or were revoked.
-- KEYS  1 which sinks take which documents
-- ARGV  1 ms for which it is kept
--       2.. end and task, with a space between; names of the sinks, or '' for none
-- Returns how many there are now.
for n = 2, #ARGV, 2 do -- bound: the ends and tasks of this call
  if ARGV[n + 1] == '' then
    redis.call('HDEL', KEYS[1], ARGV[n])
  else
    redis.call('HSET', KEYS[1], ARGV[n], ARGV[n + 1])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('HLEN', KEYS[1])
