-- Put a command into an inbox, and wake its process.
-- KEYS  1 inbox
--       2 nonce of the command
-- ARGV  1 the command's id
--       2 the command, signed or as JSON
--       3 the most commands that an inbox may hold
--       4 for how long it is kept in ms
-- Returns 1, or 0 when the inbox is full. Repeating the call sends nothing more.
-- The inbox is kept for as long as its last command, so an inbox without a reader expires.
local inbox = KEYS[1]
if redis.call('EXISTS', KEYS[2]) == 1 then return 1 end
if redis.call('XLEN', inbox) >= tonumber(ARGV[3]) then return 0 end
redis.call('XADD', inbox, '*', 'id', ARGV[1], 'command', ARGV[2])
redis.call('PEXPIRE', inbox, ARGV[4])
redis.call('SET', KEYS[2], 'posted', 'PX', ARGV[4])
redis.call('PUBLISH', inbox, ARGV[1])
return 1
