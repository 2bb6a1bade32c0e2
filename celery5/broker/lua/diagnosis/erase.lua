-- Delete everything that a queue has, also the waiting lists of its limits, which only the places of its jobs name, and the
-- runs of workflows that live there.
-- KEYS  1 where its jobs are
--       2 prefix of the waiting lists
--       3 prefix of the keys of runs
--       4 live runs
--       5 runs that have ended lately
--       6 idle runs
--       7.. its other keys
-- Returns how many keys were deleted. Safe to repeat.
local gone = 0
for _, place in ipairs(redis.call('HVALS', KEYS[1])) do -- bound: the jobs of the queue: only for a demonstration or a test
  local list = string.match(place, '^G%d* (.*)$')
  local task, fair, token = string.match(list or '', '^([^ ]*) ([^ ]*) ([^ ]*)$')
  if task then
    local prefix = KEYS[2]
    gone = gone + redis.call('DEL', prefix .. 'line ' .. list, prefix .. 'tokens ' .. task .. ' ' .. fair,
      prefix .. 'turns ' .. task, prefix .. 'starts ' .. task, prefix .. 'full ' .. task, prefix .. 'parked ' .. task .. ' ' .. token)
  end
end
local function erase_map(key, total)
  for _, name in ipairs({':items', ':done', ':bad', ':held', ':again'}) do gone = gone + redis.call('DEL', key .. name) end -- bound: five
  for bucket = 0, math.ceil(total / 128) do gone = gone + redis.call('DEL', key .. ':r' .. bucket) end -- bound: the members of a map, as above
end
for _, list in ipairs({KEYS[4], KEYS[5]}) do -- bound: two
  local runs = redis.pcall('ZRANGE', list, 0, -1)
  runs = runs.err and {} or runs
  while runs[1] do -- bound: the runs of the queue and their children, as above
    local id = table.remove(runs)
    local key, packed = KEYS[3] .. id, redis.pcall('HGET', KEYS[6], id)
    local is_idle = type(packed) == 'string'
    local fields, names = is_idle and unpack_run(packed) or {}, is_idle and {} or redis.call('HGETALL', key)
    for n = 1, #names, 2 do fields[names[n]] = names[n + 1] end -- bound: the nodes of a run, as above
    for name, value in pairs(fields) do -- bound: as above
      local node = string.match(name, '^total:(%d+)$')
      if node then erase_map(key .. ':' .. node, tonumber(value)) end
    end
    for _, child in ipairs(redis.call('LRANGE', key .. ':children', 0, -1)) do runs[#runs + 1] = child end -- bound: as above
    gone = gone + redis.call('DEL', key, key .. ':undo', key .. ':args', key .. ':children')
  end
end
gone = gone + redis.call('DEL', KEYS[1], KEYS[2] .. 'unlimited', KEYS[4], KEYS[5], KEYS[6])
for n = 7, #KEYS do gone = gone + redis.call('DEL', KEYS[n]) end -- bound: the kinds of keys of a queue
return gone
