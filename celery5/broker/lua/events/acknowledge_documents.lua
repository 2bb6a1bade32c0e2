-- Delete documents that a Data Sink has stored. When none is left, delete their claims and counts, too.
-- KEYS  1 documents of the sink
--       2 documents that a Router has, or that wait for another try, by the time when they may be claimed
--       3 the last one that was taken, and how often each was tried without success
-- ARGV  1.. their entries
-- Returns how many were still there. Safe to repeat.
local gone = redis.call('XDEL', KEYS[1], unpack(ARGV))
redis.call('ZREM', KEYS[2], unpack(ARGV))
redis.call('HDEL', KEYS[3], unpack(ARGV))
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
return gone
