-- Send the report of a process on its metrics, once.
-- KEYS  1 stream of reports
--       2 number of the last report of this process
-- ARGV  1 number of this report
--       2 the report, packed
--       3 reports that are kept at most
--       4 ms that both keys live
-- Returns 1, or 0 when the report has come before.
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'report', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[4])
return 1
