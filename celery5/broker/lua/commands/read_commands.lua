-- Read the commands in an inbox, without removing them. Too large ones are returned without their text.
-- KEYS  1 inbox
-- ARGV  1 how many, at most
--       2 the most bytes of a command
-- Returns for each, oldest first: its entry, its unverified id, the command ('' when it is too large), and its size.
-- Changes nothing.
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])) do -- bound: ARGV 1
  local id, command = '', ''
  for n = 1, #entry[2], 2 do -- bound: the fields of an entry, as its sender wrote them
    if entry[2][n] == 'id' then id = string.sub(entry[2][n + 1], 1, 100) end
    if entry[2][n] == 'command' then command = entry[2][n + 1] end
  end
  local size = #command
  found[#found + 1] = {entry[1], id, size <= tonumber(ARGV[2]) and command or '', size}
end
return found
