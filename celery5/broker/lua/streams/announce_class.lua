-- Announce which class of records a member of a group has.
-- KEYS  1 the digest of the class of records of each member
-- ARGV  1 this member
--       2 the digest of its class
--       3 for how many ms the digests are kept
-- Returns 1.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
