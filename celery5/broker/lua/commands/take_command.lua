-- Take a command out of an inbox, so that it is done once at most, whoever puts it there again.
-- KEYS  1 inbox
--       2 nonce of the command
-- ARGV  1 its entry
--       2 who takes it
--       3 for how long its nonce is remembered in ms
-- Returns 1 when it may be done, 0 when it came before, -1 when another process with this inbox has it.
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
