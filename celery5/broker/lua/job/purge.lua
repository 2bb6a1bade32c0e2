-- Remove dead jobs for good, each by itself. Their documents stay until they expire.
-- KEYS  1 dead-letter queue
--       2 where the queue's jobs are
-- ARGV  1 channel that wakes workers
--       2.. for each job: its entry in the dead-letter queue, its id ('' when the caller could not read it)
-- Returns for each job: 1 purged; 0 it was not in the dead-letter queue any more. Safe to repeat.
local dead, jobs = KEYS[1], KEYS[2]
local results = {}
-- A message that the caller cannot read may still have a place: recovery is less strict.
local function id_of(dead_entry)
  return as_text(decode_message(fields_of(redis.call('XRANGE', dead, dead_entry, dead_entry)[1]).job).id)
end
for n = 2, #ARGV, 2 do -- bound: the jobs of this call
  local dead_entry, id = ARGV[n], ARGV[n + 1]
  if id == '' then id = id_of(dead_entry) end
  results[#results + 1] = remove_dead(dead, dead_entry)
  if id ~= '' and redis.call('HGET', jobs, id) == 'X' .. dead_entry then
    redis.call('HDEL', jobs, id)
    note_end(jobs, id, 'PURGED', '')
  end
end
notify_of_ends(ARGV[1])
if redis.call('XLEN', dead) == 0 then redis.call('DEL', dead, dead .. ':causes') end
return results
