-- Member: a part of the scripts that end jobs: they begin with it. A job whose id has a `~` is a member of a run of a workflow:
-- `<run>~<node>.<generation>~<number>@<home>`.
-- Note that a job has ended, if it is a member: for advance.lua, which moves runs on, on a list named after `jobs`; for a run
-- whose home is another queue, in the outbox, which is named after it, too.
local function note_end(jobs, id, state, document)
  if not string.find(id, '~', 1, true) then return end
  local home, record = string.match(id, '@(.*)$'), cmsgpack.pack({'end', id, state, document})
  if home then
    redis.call('XADD', jobs .. ':to-send', '*', 'home', home, 'record', record)
  else
    redis.call('RPUSH', jobs .. ':ended', record)
  end
end
