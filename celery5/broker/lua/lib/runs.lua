-- Runs: a part of advance.lua, which moves runs on. A run is read once in a call, and written at its end.
-- Return a run, read once; false when there is none.
local function run_of(id)
  local run = runs[id]
  if run ~= nil then return run end
  local found = redis.call('HMGET', prefix .. id, unpack(HEADER))
  run = found[2] and {id = id, key = prefix .. id, fields = {}, changed = {}, work = {}} or false
  runs[id] = run
  if not run then return false end
  for n, name in ipairs(HEADER) do run.fields[name] = found[n] end -- bound: the fields above
  if found[11] then run.work = cmsgpack.unpack(found[11]) end
  order[#order + 1] = run
  return run
end
local function get(run, name)
  local value = run.fields[name]
  if value == nil then
    value = redis.call('HGET', run.key, name)
    run.fields[name] = value
  end
  return value
end
local function put(run, name, value)
  run.fields[name] = value
  run.changed[name] = true
end
local function number(run, name) return tonumber(get(run, name) or 0) end
local function add(run, name, by)
  if by ~= 0 then put(run, name, number(run, name) + by) end
end
local function write_runs()
  for _, run in ipairs(order) do -- bound: the runs of the records of this call
    put(run, 'work', run.work[1] and cmsgpack.pack(run.work) or false)
    local set, gone = {}, {}
    for name in pairs(run.changed) do -- bound: the steps of this call
      local value = run.fields[name]
      if value then set[#set + 1], set[#set + 2] = name, value else gone[#gone + 1] = name end
    end
    for first = 1, #set, 500 do -- bound: as above
      redis.call('HSET', run.key, unpack(set, first, math.min(first + 499, #set)))
    end
    for first = 1, #gone, 500 do -- bound: as above
      redis.call('HDEL', run.key, unpack(gone, first, math.min(first + 499, #gone)))
    end
    run.changed = {}
    if run.expires then redis.call('PEXPIRE', run.key, ttl) end
  end
  for first = 1, #places, 500 do -- bound: the jobs that were sent
    redis.call('HSET', jobs, unpack(places, first, math.min(first + 499, #places)))
  end
end
-- Return a node of the definition of a run; nothing when the definition is lost.
local function node_of(run, n)
  local known = nodes[run.fields.def]
  if not known then
    known = {}
    nodes[run.fields.def] = known
  end
  if known[n] == nil then
    local raw = redis.call('HGET', definitions .. run.fields.def, n)
    known[n] = raw and cmsgpack.unpack(raw) or false
  end
  return known[n]
end
local function to_outbox(...)
  redis.call('XADD', outbox, '*', ...)
end
local function record_later(...) redis.call('RPUSH', ended, cmsgpack.pack({...})) end
-- Return the state of a node, and its generation: how often it was started again.
local function state_of(run, n)
  local state = get(run, 'node:' .. n)
  if not state then return nil, 0 end
  local word, generation = string.match(state, '^(%a+) ?(%d*)$')
  return word, tonumber(generation) or 0
end
local function set_state(run, n, state, generation)
  put(run, 'node:' .. n, generation and generation > 0 and state .. ' ' .. generation or state)
end
local function member_id(run, n, generation, member, is_elsewhere)
  local id = run.id .. '~' .. n
  if generation > 0 then id = id .. '.' .. generation end
  if member then id = id .. '~' .. member end
  return is_elsewhere and id .. '@' .. home or id
end
