-- Take everything away that a queue has, also the waiting rooms of its gates, which only the places of its jobs name.
-- KEYS  1 where its jobs are
--       2 prefix of the waiting room
--       3.. its other keys
-- Gives how many keys are gone. Safe to repeat.
local gone = 0
for _, place in ipairs(redis.call('HVALS', KEYS[1])) do -- bound: the jobs of the queue: only for a demonstration or a test
  local line = string.match(place, '^G%d* (.*)$')
  local task, fair, token = string.match(line or '', '^([^ ]*) ([^ ]*) ([^ ]*)$')
  if task then
    local room = KEYS[2]
    gone = gone + redis.call('DEL', room .. 'line ' .. line, room .. 'tokens ' .. task .. ' ' .. fair,
      room .. 'turns ' .. task, room .. 'starts ' .. task, room .. 'full ' .. task, room .. 'parked ' .. task .. ' ' .. token)
  end
end
gone = gone + redis.call('DEL', KEYS[1])
for n = 3, #KEYS do gone = gone + redis.call('DEL', KEYS[n]) end -- bound: the kinds of keys of a queue
return gone
