-- Note whether the webhook has taken a notification of an alert.
-- KEYS  1 notifications that are not sent yet
--       2 the last notification of each alert that was not taken
-- ARGV  1 id of the notification, to remove it; '' to keep it
--       2 the alert
--       3 the notification, and why it was not taken; '' when it was
--       4 ms that the second key lives
--       5 alerts that it has at most
-- Returns 1.
if ARGV[1] ~= '' then redis.call('XDEL', KEYS[1], ARGV[1]) end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
  return 1
end
if redis.call('HLEN', KEYS[2]) < tonumber(ARGV[5]) or redis.call('HEXISTS', KEYS[2], ARGV[2]) == 1 then
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return 1
