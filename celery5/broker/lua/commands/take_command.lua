-- Take a command out of an inbox, so that it is executed at most once, even if it is sent again.
-- KEYS  1 inbox
--       2 nonce of the command
-- ARGV  1 its entry
--       2 the process that takes it
--       3 ms for which its nonce is kept
-- Returns 1 when it may be executed, 0 when it was taken before, -1 when another process with this inbox has it.
-- Repeating the call returns the same again.
local entry, mine = ARGV[1], ARGV[1] .. ' ' .. ARGV[2]
redis.call('XDEL', KEYS[1], entry)
local before = redis.call('GET', KEYS[2])
if not before or before == 'posted' then
  redis.call('SET', KEYS[2], mine, 'PX', ARGV[3])
  return 1
end
if before == mine then return 1 end
return string.sub(before, 1, #entry + 1) == entry .. ' ' and -1 or 0
