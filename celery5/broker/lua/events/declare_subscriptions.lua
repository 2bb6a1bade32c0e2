-- Declare subscriptions: each is kept until its time unless it is declared again. Whoever is new, or has changed, gets the
-- events that were kept because nobody wanted them, if it is to. Safe to repeat.
-- KEYS  1 registry of subscriptions
--       2 until when each of them counts, in ms
--       3 stream of the events
--       4 where the events are
--       5.. kept events of each subject
-- ARGV  1 how long a declaration counts, in ms
--       2 how many kept events at most are put on the stream, 0 for none
--       3 how many subscriptions follow
--       4.. for each: its name, what the registry is to say
-- Returns how many subscriptions were new or have changed, how many kept events were put on the stream, and the names of
-- those that were taken back (unsubscribe.lua): they are not in force, and stay so while they are declared.
local registry, subscribed, stream, jobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now, span = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[1])
local changed, moved, back = 0, 0, {}
redis.call('ZREM', subscribed, '') -- removes nothing: Redis does it when its memory is full, and so what follows, too
for n = 4, 2 + 2 * ARGV[3], 2 do -- bound: the subscriptions of this call
  local there = redis.call('HGET', registry, ARGV[n])
  if there == '' then
    back[#back + 1] = ARGV[n]
  elseif there ~= ARGV[n + 1] then
    redis.call('HSET', registry, ARGV[n], ARGV[n + 1])
    changed = changed + 1
  end
  redis.call('ZADD', subscribed, now + span, ARGV[n])
end
-- The field without a name says which state of the registry this is: a time, since all may be lost and begun again.
if changed > 0 then redis.call('HSET', registry, '', time[1] .. string.format('%06d', time[2])) end
for n = 1, 2 do -- bound: two keys
  if redis.call('PTTL', KEYS[n]) < span then redis.call('PEXPIRE', KEYS[n], span) end
end
local space = tonumber(ARGV[2])
for n = 5, #KEYS do -- bound: the subjects of this call
  if space > moved then
    local kept = redis.call('XRANGE', KEYS[n], '-', '+', 'COUNT', space - moved)
    for _, one in ipairs(kept) do -- bound: ARGV 2 of all subjects together
      local field = {}
      for m = 1, #one[2], 2 do field[one[2][m]] = one[2][m + 1] end -- bound: the fields of an entry, as its sender wrote them
      redis.call('XDEL', KEYS[n], one[1])
      if field.id and redis.call('HEXISTS', jobs, field.id) == 0 then
        redis.call('HSET', jobs, field.id, 'S' .. redis.call('XADD', stream, '*', 'job', field.job or ''))
      end
      moved = moved + 1
    end
    if #kept > 0 and redis.call('XLEN', KEYS[n]) == 0 then redis.call('DEL', KEYS[n]) end
  end
end
return {changed, moved, back}
