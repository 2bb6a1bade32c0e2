-- Run messages: a part of advance.lua. The messages of jobs, made of the templates of nodes, and where they are sent.
local function add_run_messages(call)
  local now, places, streams, wake, get, member_id = call.now, call.places, call.streams, call.wake, call.get, call.member_id
  local to_outbox = call.to_outbox
  -- Return an argument of a run, which its plan names by a negative number. Long ones are in a hash of their own.
  local function argument_of(run, number)
    local name, text = -1 - number, nil
    if get(run, 'args') then text = redis.call('HGET', run.key .. ':args', name) else text = get(run, 'arg:' .. name) end
    return text or error('an argument of the run is lost')
  end
  -- Return what a plan says itself, or by the number of an argument.
  local function own_or_plain(run, value)
    if type(value) == 'number' and value < 0 then return argument_of(run, value) end
    return value
  end
  -- Put the texts of a template into `parts`: a number stands for the value of that node, a negative one for an argument of the run, `true`
  -- for the item of a member, a table for a list of templates, without those whose node was skipped.
  local function render(run, template, parts, item)
    for _, part in ipairs(template) do -- bound: the parts of a message, 100 at most
      if type(part) == 'string' then
        parts[#parts + 1] = part
      elseif part == true then
        parts[#parts + 1] = item
      elseif type(part) == 'number' then
        parts[#parts + 1] = part < 0 and argument_of(run, part) or get(run, 'value:' .. part) or 'null'
      else
        parts[#parts + 1] = '['
        local is_first = true
        for _, element in ipairs(part) do -- bound: as above
          if type(element) ~= 'number' or element < 0 or get(run, 'value:' .. element) then
            if not is_first then parts[#parts + 1] = ',' end
            is_first = false
            render(run, {element}, parts, item)
          end
        end
        parts[#parts + 1] = ']'
      end
    end
  end
  -- Return the parts of the message of a job. The second one is for its id, as JSON.
  local function message_parts(run, node, item)
    local parts = {'{"v":1,"id":', ''}
    render(run, node.t, parts, item)
    parts[#parts + 1] = string.format(',"sent":%.3f', now / 1000)
    if node.x then parts[#parts + 1] = string.format(',"expires":%.3f', (now + own_or_plain(run, node.x)) / 1000) end
    parts[#parts + 1] = (get(run, 'tail') or '') .. '}'
    return parts
  end
  -- Put a job on a stream of this queue.
  local function send_here(node, id, message)
    local lane = node.l or ''
    places[#places + 1] = id
    places[#places + 1] = 'S' .. redis.call('XADD', streams[lane], '*', 'job', message) .. lane
    call.budget = call.budget - 1
  end
  local function wake_lane(node)
    local lane = node.l or ''
    if lane ~= '' and redis.call('EXISTS', streams[lane]) == 0 then redis.call('PUBLISH', wake, 'lane') end
  end
  -- Send one job: to a stream of this queue, or by the outbox when it goes elsewhere, has a key or a time.
  local function send_job(run, n, node, generation, member, item)
    local other = node.p
    local id = member_id(run, n, generation, member, other)
    local parts = message_parts(run, node, item)
    parts[2] = cjson.encode(id)
    if not other then
      wake_lane(node)
      return send_here(node, id, table.concat(parts))
    end
    to_outbox('job', id, 'message', table.concat(parts), 'queue', other.queue, 'task', node.task or '', 'lane', other.lane or '',
      'lock', own_or_plain(run, other.lock) or '', 'unique_for', other.unique_for or '',
      'at', other.delay and string.format('%.0f', now + own_or_plain(run, other.delay)) or '')
    call.budget = call.budget - 1
  end
  -- Send members of a map, from the one with the number `first` on. Their messages differ in id and item only, so the rest is
  -- rendered once.
  local function send_members(run, n, node, generation, first, items)
    if node.p then
      for at, item in ipairs(items) do send_job(run, n, node, generation, first + at - 1, item) end -- bound: ARGV 1
      return
    end
    if not items[1] then return end
    wake_lane(node)
    local gap, gaps = {}, {}
    local parts, frame = message_parts(run, node, gap), member_id(run, n, generation) .. '~'
    for at, part in ipairs(parts) do -- bound: the parts of a message, 100 at most
      if part == gap then gaps[#gaps + 1] = at end
    end
    for at, item in ipairs(items) do -- bound: ARGV 1
      local id = frame .. first + at - 1
      parts[2] = '"' .. id .. '"' -- the id of a run has no character that JSON escapes
      for _, place in ipairs(gaps) do parts[place] = item end -- bound: as above
      send_here(node, id, table.concat(parts))
    end
  end
  call.render, call.send_job, call.send_members = render, send_job, send_members
end
