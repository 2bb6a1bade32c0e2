-- Run maps: a part of advance.lua. Sends the members of a map, and ends it.
local function add_run_maps(call)
  local home, may_begin, number, get, put, record_later = call.home, call.may_begin, call.number, call.get, call.put, call.record_later
  local add, send_job, send_members, state_of, failures = call.add, call.send_job, call.send_members, call.state_of, call.failures
  local succeed, member_id, fail_node, set_state = call.succeed, call.member_id, call.fail_node, call.set_state
  local WINDOW = 8192 -- jobs of one map on the stream
  -- Send members of a map, as far as its window and the budget allow: first those that a retry sends again.
  local function refill(run, n, node, generation)
    if not may_begin(run) then return end
    local items = run.key .. ':' .. n .. ':items'
    local sent, total, again = number(run, 'sent:' .. n), number(run, 'total:' .. n), number(run, 'again:' .. n)
    local out = sent - number(run, 'done:' .. n) - number(run, 'failed:' .. n) - number(run, 'held:' .. n) - again
    local wanted = math.min((node.w or WINDOW) - out, total - sent + again)
    if wanted <= 0 then return end
    local count = math.floor(math.min(wanted, math.max(call.budget, 1))) -- one at least, so that each call gets on
    if count < wanted and not get(run, 'filling:' .. n) then
      put(run, 'filling:' .. n, 1)
      record_later('fill', run.id, n)
    end
    add(run, 'active', count)
    local resent = math.min(again, count)
    for _ = 1, resent do -- bound: ARGV 1
      local member = redis.call('BITPOS', run.key .. ':' .. n .. ':again', 1)
      redis.call('SETBIT', run.key .. ':' .. n .. ':again', member, 0)
      send_job(run, n, node, generation, member, redis.call('LINDEX', items, member))
    end
    add(run, 'again:' .. n, -resent)
    if resent > 0 and number(run, 'again:' .. n) <= 0 then redis.call('DEL', run.key .. ':' .. n .. ':again') end
    count = count - resent
    if count == 0 then return end
    send_members(run, n, node, generation, sent, redis.call('LRANGE', items, sent, sent + count - 1))
    put(run, 'sent:' .. n, sent + count)
  end
  local function need_of(node, total) return node.q and math.ceil(node.q * total - 1e-9) or total end
  -- End a map when all members have ended.
  local function end_map(run, n, node, generation)
    local total, bad = number(run, 'total:' .. n), number(run, 'failed:' .. n)
    if number(run, 'done:' .. n) + bad < total then return end
    local state = state_of(run, n)
    if state ~= 'active' then return end
    if total - bad >= need_of(node, total) or (bad > 0 and node.o == 'skip' and not node.q) then
      if node.e then failures().note_members(run, n, node, generation) end
      return succeed(run, n, node, generation, '@map ' .. n)
    end
    local document = get(run, 'error:' .. n) or ''
    if node.q then
      document = cjson.encode({v = 1, id = member_id(run, n, generation), task = node.task or '', state = 'DEAD', failure = {type = 'TooFewSucceeded',
        message = (total - bad) .. ' of ' .. total .. ' succeeded, needed were ' .. need_of(node, total)}})
    end
    -- A map that holds its failures ends with those whose dead letters were purged: it is not held again.
    fail_node(run, n, node, generation, node.o == 'hold' and 'PURGED' or 'DEAD', document)
  end
  -- Begin a map: at once, or with a job that reads its items from the values before it, and tells them to the run.
  local function begin_map(run, n, node, generation)
    set_state(run, n, 'active', generation)
    if node.m and not get(run, 'total:' .. n) then
      local is_away = node.queue and node.queue ~= home
      add(run, 'active', 1)
      return send_job(run, n, {task = node.task, t = node.m, x = node.x, l = node.l, p = is_away and {queue = node.queue, lane = node.l}}, generation)
    end
    refill(run, n, node, generation)
    end_map(run, n, node, generation)
  end
  call.refill, call.need_of, call.end_map, call.begin_map = refill, need_of, end_map, begin_map
end
