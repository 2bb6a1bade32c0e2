-- Runs: a part of advance.lua, which moves runs on. A run is read once in a call, and written at its end.
local function add_runs(call)
  local prefix, runs, order, idle, ttl, places, jobs = call.prefix, call.runs, call.order, call.idle, call.ttl, call.places, call.jobs
  local nodes, definitions, outbox, ended, home = call.nodes, call.definitions, call.outbox, call.ended, call.home
  local LIVE, SUCCESS, FAILED, CANCELLED, EXPIRED, UNDOING = 'live', 'success', 'failed', 'cancelled', 'expired', 'undoing'
  local STATES = {[SUCCESS] = 'SUCCESS', [FAILED] = 'DEAD', [CANCELLED] = 'REVOKED', [EXPIRED] = 'EXPIRED'}
  local HEADER = {'def', 'state', 'active', 'tail', 'until', 'parent', 'done', 'bad', 'skipped', 'error', 'work', 'wakes', 'created', 'held', 'root'}
  -- Note a run of this call. Where it is when the call begins: `hash`, `idle`, or `new`, when it is nowhere yet. All fields of an idle or
  -- a new one are in memory.
  local function add_run(id, place, fields)
    local run = {id = id, key = prefix .. id, place = place, fields = fields, changed = {}, work = {}}
    runs[id], order[#order + 1] = run, run
    return run
  end
  -- Return a run, read once; false when there is none.
  local function run_of(id)
    local run = runs[id]
    if run ~= nil then return run end
    local found = redis.call('HMGET', prefix .. id, unpack(HEADER))
    if found[2] then
      run = add_run(id, 'hash', {})
      for n, name in ipairs(HEADER) do run.fields[name] = found[n] end -- bound: the fields above
      if run.fields.work then run.work = cmsgpack.unpack(run.fields.work) end
      return run
    end
    local packed = redis.call('HGET', idle, id)
    if packed then return add_run(id, 'idle', unpack_run(packed)) end
    runs[id] = false
    return false
  end
  -- Return the root of a child: the run that people have started, of which it is a part. Nothing for any other run.
  local function root_of(run) return run.fields.root and run_of(run.fields.root) end
  local function get(run, name)
    local value = run.fields[name]
    if value == nil and run.place == 'hash' then
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
  -- Return all fields of a run as one value, when it is idle, and they are neither many nor long; else nothing.
  local function pack_idle(run)
    if run.place == 'hash' then
      if redis.call('HLEN', run.key) > MOST_FIELDS then return nil end
      local rest, size = {}, 0
      for _, name in ipairs(redis.call('HKEYS', run.key)) do -- bound: MOST_FIELDS
        if run.fields[name] == nil then
          rest[#rest + 1], size = name, size + redis.call('HSTRLEN', run.key, name)
        end
      end
      if size > MOST_BYTES then return nil end
      for _, name in ipairs(rest) do get(run, name) end -- bound: MOST_FIELDS
    end
    return pack_run(run.fields)
  end
  -- Write runs to where they belong now: among the idle ones, or to their own hashes.
  local function write_runs()
    for _, run in ipairs(order) do -- bound: the runs of the records of this call
      local is_hash, fields, work = run.place == 'hash', run.fields, run.work[1]
      if work or fields.work then put(run, 'work', work and cmsgpack.pack(run.work) or false) end
      local is_idle = not work and fields.state == LIVE and number(run, 'active') <= 0
      local packed, set, gone = is_idle and next(run.changed) and pack_idle(run), {}, {}
      if packed then
        redis.call('HSET', idle, run.id, packed)
        if is_hash then redis.call('DEL', run.key) end
      elseif next(run.changed) then
        if run.place == 'idle' then redis.call('HDEL', idle, run.id) end
        for name in pairs(is_hash and run.changed or fields) do -- bound: the steps of this call, or MOST_FIELDS
          local value = fields[name]
          if value then set[#set + 1], set[#set + 2] = name, value elseif is_hash then gone[#gone + 1] = name end
        end
        for first = 1, #set, 500 do -- bound: as above
          redis.call('HSET', run.key, unpack(set, first, math.min(first + 499, #set)))
        end
        for first = 1, #gone, 500 do -- bound: as above
          redis.call('HDEL', run.key, unpack(gone, first, math.min(first + 499, #gone)))
        end
        if run.expires or run.fields.root and not root_of(run) then redis.call('PEXPIRE', run.key, ttl) end
      end
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
  -- Return what all runs of a definition share: `name`, `end`, `all`, `maps`, `undo` and `fail`.
  local function head_of(run) return node_of(run, 'head') or {} end
  local COUNTS = {all = true, done = true, bad = true, skipped = true, active = true, held = true, undos = true, undo_done = true,
    undo_bad = true, undo_purged = true}
  local add
  -- Add to a number of a run. What people count is added to the root, too.
  function add(run, name, by)
    if by == 0 then return end
    put(run, name, (tonumber(get(run, name)) or name == 'all' and head_of(run).all or 0) + by)
    local root = COUNTS[name] and root_of(run)
    if root then add(root, name, by) end
  end
  -- Return whether jobs of a run may begin: it is live, and so is the run that it is a part of.
  local function may_begin(run)
    if get(run, 'state') ~= LIVE then return false end
    local root = root_of(run)
    return not run.fields.root or root and get(root, 'state') == LIVE
  end
  -- Return how many ms a run has, from its start or from a retry on.
  local function life_of(run) return tonumber(get(run, 'life')) or number(run, 'until') - number(run, 'created') end
  -- Let a definition stay for as long as a run may need it.
  local function keep_definition(run)
    local key, life = definitions .. run.fields.def, life_of(run) + 2 * ttl
    if redis.call('PTTL', key) < life then redis.call('PEXPIRE', key, string.format('%.0f', life)) end
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
  -- Return the id of a job. With the home at its end when the outbox sends it: such a job may be sent twice, and its end is remembered.
  local function member_id(run, n, generation, member, by_outbox)
    local id = run.id .. '~' .. n
    if generation > 0 then id = id .. '.' .. generation end
    if member then id = id .. '~' .. member end
    return by_outbox and id .. '@' .. home or id
  end
  -- Read the parts of an id of a member: run, node, generation, and the number in a map.
  local function parse(id)
    local run, n, generation, member = string.match(id, '^([^~]+)~(%d+)%.?(%d*)~?(%d*)')
    return run, tonumber(n), tonumber(generation) or 0, tonumber(member)
  end
  call.LIVE, call.SUCCESS, call.FAILED, call.CANCELLED, call.EXPIRED, call.UNDOING = LIVE, SUCCESS, FAILED, CANCELLED, EXPIRED, UNDOING
  call.STATES, call.add_run, call.run_of, call.root_of, call.get, call.put, call.number = STATES, add_run, run_of, root_of, get, put, number
  call.write_runs, call.node_of, call.head_of, call.add, call.may_begin = write_runs, node_of, head_of, add, may_begin
  call.life_of, call.keep_definition, call.to_outbox, call.record_later = life_of, keep_definition, to_outbox, record_later
  call.state_of, call.set_state, call.member_id, call.parse = state_of, set_state, member_id, parse
end
