-- Set when claimed documents of a Data Sink may be claimed again: later, while they are being written; now,
-- when they are given back; after a while, when they were tried without success.
-- KEYS  1 documents of the sink
--       2 documents that a Router has, or that wait for another try, by the time when they may be claimed
--       3 the last one that was taken, and how often each was tried without success
-- ARGV  1 in how many ms
--       2 1 when they were tried without success, which is counted, else 0
--       3.. their entries
-- Returns how many of them are still there.
local now = now_ms()
local left = 0
for n = 3, #ARGV do -- bound: the documents of this call
  if #redis.call('XRANGE', KEYS[1], ARGV[n], ARGV[n]) == 1 then
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[1]), ARGV[n])
    if ARGV[2] == '1' then redis.call('HINCRBY', KEYS[3], ARGV[n], 1) end
    left = left + 1
  end
end
return left
