-- Time sent: when jobs were sent. A part of the scripts that move messages away from their entries, or delete them: they begin with it.
-- Return the time at which a job was sent, in seconds, as text, where its message leaves that to its entry on a stream, whose id begins
-- with the time in ms; else nothing. `command` has the fields of the message.
local function sent_by_entry(command, entry)
  if command.sent or command.attempt or command.replays then return end -- it says so, or this is not its first entry
  local seconds, ms = string.match(entry, '^(%d%d%d%d%d%d%d%d%d%d)(%d%d%d)%-') -- not of an id made by hand
  return seconds and seconds .. '.' .. ms
end
-- Return a message for another entry: with the time at which its job was sent. Without its fields, it is decoded only where its text may say
-- that time, since decoding takes as long as a command.
local function with_sent(message, entry, command)
  if not command then
    local readable, fields = pcall(cjson.decode, string.find(message, '"sent"', 1, true) and message or '{}')
    if not readable or type(fields) ~= 'table' then return message end
    command = fields
  end
  local sent = sent_by_entry(command, entry)
  return sent and (string.gsub(message, '}%s*$', ',"sent":' .. sent .. '}')) or message
end
