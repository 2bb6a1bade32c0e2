-- Move a document that a Data Sink refused to the queue's dead-letter queue.
-- KEYS  1 documents of the sink
--       2 documents that a Router has, or that wait for another try, by the time when they may be claimed
--       3 the last one that was taken, and how often each was tried without success
--       4 dead-letter queue
-- ARGV  1 its entry
--       2 name of the sink
--       3 what went wrong, as JSON
-- Returns 1, or 0 when it was not there any more. Safe to repeat.
local there = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
local document = ''
for n = 1, there and #there[2] or 0, 2 do -- bound: the fields of an entry, as its sender wrote them
  if there[2][n] == 'document' then document = there[2][n + 1] end
end
if there then redis.call('XADD', KEYS[4], '*', 'sink', ARGV[2], 'document', document, 'failure', ARGV[3]) end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1], KEYS[2], KEYS[3]) end
return there and 1 or 0
