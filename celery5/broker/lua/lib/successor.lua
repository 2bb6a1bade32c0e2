-- Successor: a part of the scripts that know whether another process works in the place of a lost one: they begin with it.
-- The name of a process without the word that each of its incarnations adds, as `get_inbox_name` has it.
local function inbox_of(process)
  local inbox = string.match(process, '^(.*):')
  return inbox and inbox ~= '' and inbox or process
end
-- Whether one process works in the place of a lost one: both have one name, or none but those of their host and process id, as
-- `has_successor` has it.
local function is_successor(process, lost)
  local inbox, other = inbox_of(process), inbox_of(lost)
  local host = string.match(inbox, '^(.*):%d+$')
  return inbox == other or host ~= nil and host == string.match(other, '^(.*):%d+$')
end
