-- Ending: what the scripts that end jobs share: they begin with it.
-- Return the fields of a message. It may contain anything, and an error in the middle of a script could lose jobs. So a
-- message that cannot be decoded has no fields, and each field is checked where it is used.
local function decode_message(message)
  local readable, command = pcall(cjson.decode, message or '')
  return readable and type(command) == 'table' and command or {}
end
local function as_text(value) return type(value) == 'string' and value or '' end
local function as_whole(value, least)
  return type(value) == 'number' and value >= least and value < 1e15 and math.floor(value) or least
end
-- Return what the key of a job is remembered under, '' when it has none.
local function lock_of(command)
  local key = as_text(command.key)
  return key ~= '' and as_text(command.task) .. ' ' .. key or ''
end
-- Return the lane of a job by its priority.
local function lane_of(command) return ({high = 'h', low = 'l'})[as_text(command.priority)] or '' end
-- Free the key of a job, unless another job has taken it.
local function unlock(unique, lock, id)
  if lock ~= '' and redis.call('HGET', unique, lock) == id then redis.call('HDEL', unique, lock) end
end
-- Keep the document of a job that has ended, and announce it.
local function store_document(result, document, ttl)
  redis.call('SET', result, document, 'PX', ttl)
  redis.call('PUBLISH', result, document)
end
-- Put a document on the streams of Data Sinks: `sinks` are their names, `documents` is the key that the streams are named
-- after, and the channel that wakes Routers. Returns whether there are any sinks.
local function send_to_sinks(documents, sinks, document)
  for sink in string.gmatch(sinks or '', '%S+') do -- bound: the sinks of one task
    redis.call('XADD', documents .. ':' .. sink, '*', 'document', document)
  end
  return (sinks or '') ~= ''
end
-- Do the same for a job that no worker ended: its sinks are looked up by the state and the task.
local function look_up_sinks(documents, state, task, document)
  local found = send_to_sinks(documents, redis.call('HGET', documents, state .. ' ' .. task) or '', document)
  if found then redis.call('PUBLISH', documents, '') end
end
-- Put the body of an entry into a table by its fields.
local function fields_of(entry)
  local fields = {}
  for n = 1, entry and #entry[2] or 0, 2 do fields[entry[2][n]] = entry[2][n + 1] end -- bound: the fields of an entry, as its sender wrote them
  return fields
end
