-- Add attempts that have ended in a process to the history, once.
-- KEYS  1 stream of failures
--       2 stream of other attempts
--       3 number of the last batch of this process
-- ARGV  1 number of this batch
--       2 records that each stream keeps, about
--       3 ms that the streams live
--       4 ms that the number lives
--       5 failures that were not kept; 0 for none
--       6 how many of the records are failures
--       7.. records, packed: first the failures
-- Returns 1, or 0 when the batch has come before.
if redis.call('GET', KEYS[3]) == ARGV[1] then return 0 end
local count = tonumber(ARGV[6])
for n = 7, #ARGV do -- bound: the records of this call
  redis.call('XADD', n - 6 <= count and KEYS[1] or KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'job', ARGV[n])
end
if ARGV[5] ~= '0' then redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'lost', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[4])
return 1
