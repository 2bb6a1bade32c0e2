-- A Data Sink has these documents: they go. When none is left, so does all that was known of them.
-- KEYS  1 documents of the sink
--       2 those that somebody has, or that are to be tried again, by when another may take them
--       3 the last one that was taken, and how often each was tried in vain
-- ARGV  1.. their entries
-- Returns how many were still there. Safe to repeat.
local gone = redis.call('XDEL', KEYS[1], unpack(ARGV))
redis.call('ZREM', KEYS[2], unpack(ARGV))
redis.call('HDEL', KEYS[3], unpack(ARGV))
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
return gone
