-- Save what became of alerts, when that was, and the notifications of it, all at once, so that each alert fires once.
-- KEYS  1 whose turn it is to roll reports up
--       2 alerts
--       3 notifications that are not sent yet
--       4 history
-- ARGV  1 name of this process
--       2 revision of the alerts that was decided on; '' for none
--       3 the alerts, packed
--       4 ms that the alerts and the notifications live
--       5 ms that the history is kept
--       6 notifications and entries of the history that stay, at most
--       7.. transitions, each of two: 1 for one that somebody is notified of or 0, and what it is
-- Returns the new revision, or '' when it is not this one's turn or another process has saved.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return '' end
local revision = redis.call('HGET', KEYS[2], 'revision') or ''
if revision ~= ARGV[2] then return '' end
revision = string.format('%.0f', (tonumber(revision) or 0) + 1)
redis.call('HSET', KEYS[2], 'revision', revision, 'alerts', ARGV[3], 'evaluated', string.format('%.0f', now_ms()))
redis.call('PEXPIRE', KEYS[2], ARGV[4])
for n = 7, #ARGV, 2 do -- bound: the transitions of this call
  redis.call('XADD', KEYS[4], 'MAXLEN', ARGV[6], '*', 'alert', ARGV[n + 1])
  redis.call('PEXPIRE', KEYS[4], ARGV[5])
  if ARGV[n] == '1' then
    redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[6], '*', 'alert', ARGV[n + 1])
    redis.call('PEXPIRE', KEYS[3], ARGV[4])
  end
end
return revision
