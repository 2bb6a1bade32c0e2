-- Read the fields of a run in portions; those of an idle run, which are few, at once.
-- KEYS  1 the run
--       2 idle runs
-- ARGV  1 the id of the run
--       2 the cursor: 0 to begin
-- Returns the next cursor, 0 at the end, and names and values in turn.
local packed = redis.call('HGET', KEYS[2], ARGV[1])
if not packed then return redis.call('HSCAN', KEYS[1], ARGV[2], 'COUNT', 500) end
local flat = {}
for name, value in pairs(unpack_run(packed)) do flat[#flat + 1], flat[#flat + 2] = name, value end -- bound: MOST_FIELDS
return {'0', flat}
