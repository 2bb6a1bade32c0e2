-- Take entries off the outbox of runs that were performed. In one step: an entry that is acknowledged and still there would
-- be nobody's for ever.
-- KEYS  1 outbox
-- ARGV  1 consumer group
--       2.. the entries, 100 at most
-- Returns how many of them were there. Safe to repeat.
redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
return redis.call('XDEL', KEYS[1], unpack(ARGV, 2))
