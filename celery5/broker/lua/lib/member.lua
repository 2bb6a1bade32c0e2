-- Member: a part of the scripts that end jobs: they begin with it. What is to be done then in other slots goes into an outbox. A job whose id has a `~` is a member of a run of a workflow:
-- `<run>~<node>.<generation>~<number>@<home>`.
-- Note that a job has ended, if it is a member: for advance.lua, which moves runs on, on a list named after `jobs`; for a run
-- whose home is another queue, in the outbox, which is named after it, too. One with a key or a time has its home in its id, also
-- where that is this queue.
local has_noted = false
local function note_end(jobs, id, state, document)
  if not string.find(id, '~', 1, true) then return end
  has_noted = true
  local home, record = string.match(id, '@(.*)$'), cmsgpack.pack({'end', id, state, document})
  if home and home ~= string.match(jobs, '^[^{]*{[^:]*:(.*)}:jobs$') then
    redis.call('XADD', jobs .. ':to-send', '*', 'home', home, 'record', record)
  else
    redis.call('RPUSH', jobs .. ':ended', record)
  end
end
-- Note in the outbox that a job is dead, if its message says what is to be sent then. `entry` is that of its dead letter: so each
-- death has its own job. Returns whether it was noted.
local function note_failure(jobs, command, id, entry, message, document)
  if type(command.on_failure) ~= 'table' then return false end
  redis.call('XADD', jobs .. ':to-send', '*', 'failed', redis.sha1hex(id .. ' ' .. entry), 'message', message, 'document', document)
  return true
end
-- Have the workers of the queue move runs on, if an end was noted by somebody who does not do so.
local function notify_of_ends(wake)
  if has_noted then redis.call('PUBLISH', wake, 'runs') end
end
