-- Stream group: a part of the scripts that look at the members of a group of a stream: they begin with it.
-- A member that is about to leave has this in front of its name, and gets no share.
local LEAVING = '\0'
local function is_leaving(member) return string.sub(member, 1, 1) == LEAVING end
-- Return the members that are there at `now`, sorted, and by incarnation whether it is there.
local function members_at(members, incarnations, now)
  local present = redis.call('ZRANGEBYSCORE', members, '(' .. now, '+inf')
  table.sort(present)
  local living = {}
  for n, member in ipairs(present) do -- bound: the members of the group
    local incarnation = redis.call('HGET', incarnations, member)
    if incarnation then living[incarnation] = true end
    if is_leaving(member) then present[n] = string.sub(member, 2) end
  end
  return present, living
end
-- Return how many members run. One that has left, and whose share is kept for its return, does not.
local function count_living(members, incarnations, now)
  local count = 0
  for _ in pairs(select(2, members_at(members, incarnations, now))) do count = count + 1 end -- bound: the members of the group
  return count
end
-- Return how many partitions the map has now, and how many it has ever had.
local function count_partitions(map)
  local known = redis.call('HMGET', map, 'partitions', 'most', 'version', 'borders')
  local count = tonumber(known[1]) or 0
  return count, math.max(count, tonumber(known[2]) or 0), tonumber(known[3]) or 0, known[4]
end
-- Assign partitions 0 to total - 1 to the members. Shares differ by one at most, and only what must move does.
local function make_plan(present, total, plan)
  local held, free, is_present = {}, {}, {}
  for _, member in ipairs(present) do held[member], is_present[member] = {}, true end -- bound: the members
  for p = 0, total - 1 do -- bound: the partitions
    local member = plan[tostring(p)]
    table.insert(is_present[member] and held[member] or free, p)
  end
  local order = {unpack(present)}
  table.sort(order, function(one, other)
    if #held[one] ~= #held[other] then return #held[one] > #held[other] end
    return one < other
  end)
  local share, rest = math.floor(total / #order), total % #order
  for n, member in ipairs(order) do -- bound: the members
    local quota = share + (n <= rest and 1 or 0)
    while #held[member] > quota do table.insert(free, table.remove(held[member])) end -- bound: the partitions
  end
  for n, member in ipairs(order) do -- bound: the members
    local quota = share + (n <= rest and 1 or 0)
    while #held[member] < quota do table.insert(held[member], table.remove(free)) end -- bound: the partitions
  end
  return held
end
-- A border is left behind by a change of the number of partitions: where each log ended then. What is behind it may be
-- read once all earlier records of the same keys are read.
-- Return what says, for a partition, up to which id it may be read ('' for all), and at which id others wait for it.
local function make_borders(text, cursor_of, logs)
  local borders = text and cjson.decode(text) or {}
  local function divisor(a, b) while b > 0 do a, b = b, a % b end return a end -- bound: Euclid's
  local open = {}
  for _, border in ipairs(borders) do -- bound: the borders, 16 at most
    local step, waits = divisor(border.old, border.new), {}
    for p = 0, border.old - 1 do -- bound: the partitions
      local cursor, tail = cursor_of(p), border.tails[p + 1]
      -- Records that were dropped or archived are not waited for: nobody will read them.
      local is_awaited = is_before(cursor, tail) and #redis.call('XRANGE', logs .. p, '(' .. cursor, tail, 'COUNT', 1) > 0
      if is_awaited then waits[p % step] = true end
    end
    table.insert(open, {step = step, waits = waits, tails = border.tails, old = border.old})
  end
  return function(p)
    local limit, awaited = '', ''
    for _, border in ipairs(open) do -- bound: the borders
      local tail = border.tails[p + 1] or '0-0'
      if border.waits[p % border.step] then
        if p < border.old and awaited == '' and is_before(cursor_of(p), tail) then awaited = tail end
        limit = tail
        break
      end
    end
    return limit, awaited
  end
end
-- Return whether an owner that has died may have died of the first unread record: there is one, and after two deaths it
-- was on trial, alone.
local function is_suspect(deaths, epoch, trial, cursor, log)
  return (deaths < 2 or trial == epoch) and is_before(cursor, last_id(log))
end
-- Forget the parked keys of a group, with their records.
local function drop_parked(parked, parked_logs)
  for _, field in ipairs(redis.call('HKEYS', parked)) do -- bound: the parked keys of a group, 1,000 at most
    if string.sub(field, 1, 4) == 'key:' then redis.call('UNLINK', parked_logs .. string.sub(field, 5)) end
  end
  redis.call('UNLINK', parked)
end
