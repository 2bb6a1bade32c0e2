-- Store and publish the reply to a command, and remove the command from its inbox if it is there.
-- KEYS  1 inbox
--       2 answer
-- ARGV  1 entry of a command that is refused, '' for one that was taken
--       2 the reply, '' when no process waits for it
--       3 for how long it is kept in ms
--       4 1 to keep an earlier reply
-- Returns 1, or 0 when another process has refused it already.
local inbox, answer = KEYS[1], KEYS[2]
if ARGV[1] ~= '' and redis.call('XDEL', inbox, ARGV[1]) == 0 then return 0 end
if ARGV[2] ~= '' and not (ARGV[4] == '1' and redis.call('EXISTS', answer) == 1) then
  redis.call('SET', answer, ARGV[2], 'PX', ARGV[3])
  redis.call('PUBLISH', answer, ARGV[2])
end
-- Whoever writes past our scripts leaves no time to live.
if redis.call('PTTL', inbox) == -1 then redis.call('PEXPIRE', inbox, ARGV[3]) end
return 1
