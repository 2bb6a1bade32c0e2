-- Count attempts that have ended on a queue, and keep the looks by which its flow is measured.
-- KEYS  1 how many attempts have ended, and the looks
-- ARGV  1 how many more have ended
--       2 the looks: JSON, '' for those that there are
--       3 for how many ms all of it is kept
-- Returns 1.
local now = string.format('%.0f', now_ms())
if ARGV[2] == '' then redis.call('HSETNX', KEYS[1], 'since', now) end -- who looks counts nothing
redis.call('HINCRBY', KEYS[1], 'ended', ARGV[1])
if tonumber(ARGV[1]) > 0 then redis.call('HSET', KEYS[1], 'at', now) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'looks', ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
