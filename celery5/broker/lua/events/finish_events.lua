-- End what a Router has of events: those whose jobs are all there, those that nobody wants, which are kept for a while, and
-- those that cannot be read, which are dead-lettered. Safe to repeat: only who still has an event can end it.
-- KEYS  1 stream of the events
--       2 where the events are
--       3 dead events
--       4 registry of subscriptions
--       5 how many events nobody wanted, by subject
--       6.. for each event: where those of its subject are kept
-- ARGV  1 consumer group
--       2 the Router's name in it
--       3 which state of the registry it knew
--       4 how long an event is kept that nobody wants, in ms, 0 for not at all
--       5 how many of one subject are kept at most
--       6 how long the counts are kept, in ms
--       7.. for each event: verb (done, keep or bury), entry, id, subject, message, why
-- Returns for each event 1 if it has ended, 0 if another Router has it, -1 if it was to be kept and subscriptions have changed,
-- so that somebody may want it.
local stream, jobs, dead, registry, counts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group, router, retention = ARGV[1], ARGV[2], tonumber(ARGV[4])
local now = now_ms()
local known = (redis.call('HGET', registry, '') or '0') == ARGV[3]
local ended = {}
for n = 6, #KEYS do -- bound: the events of this call
  local at = 7 + 6 * (n - 6)
  local verb, entry, id, subject, message, why =
    ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
  local mine = redis.pcall('XPENDING', stream, group, entry, entry, 1, router)
  if mine.err or #mine == 0 then
    ended[#ended + 1] = 0
  elseif verb == 'keep' and not known then
    ended[#ended + 1] = -1
  else
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
    if id ~= '' and redis.call('HGET', jobs, id) == 'S' .. entry then redis.call('HDEL', jobs, id) end
    if verb == 'keep' then
      redis.call('HINCRBY', counts, subject, 1)
      redis.call('PEXPIRE', counts, ARGV[6])
      if retention > 0 then
        redis.call('XADD', KEYS[n], 'MAXLEN', '~', ARGV[5], '*', 'id', id, 'job', message)
        redis.call('XTRIM', KEYS[n], 'MINID', '~', string.format('%.0f', now - retention))
        redis.call('PEXPIRE', KEYS[n], retention)
      end
    elseif verb == 'bury' then
      redis.call('XADD', dead, '*', 'job', message, 'document', why)
    end
    ended[#ended + 1] = 1
  end
end
return ended
