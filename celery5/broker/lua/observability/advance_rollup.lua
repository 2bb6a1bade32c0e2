-- Note up to which report all groups are rolled up, after they were saved.
-- KEYS  1 where the rollup is
-- ARGV  1 id of the last report that had been rolled up before; '' for none
--       2 id of the last report that is rolled up now; '' for none
--       3 ms that the rollup lives
-- Returns 1, or 0 when another process has noted one: then nothing is changed.
if (redis.call('HGET', KEYS[1], 'cursor') or '') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'cursor', ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
