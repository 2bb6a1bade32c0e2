-- Delete everything that a queue has, also the waiting lists of its limits, which only the places of its jobs name.
-- KEYS  1 where its jobs are
--       2 prefix of the waiting lists
--       3.. its other keys
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
gone = gone + redis.call('DEL', KEYS[1])
for n = 3, #KEYS do gone = gone + redis.call('DEL', KEYS[n]) end -- bound: the kinds of keys of a queue
return gone
