-- Take jobs out of the waiting lists for a worker that has capacity for them.
-- KEYS  1 stream of the lane `handed`
--       2 leases of the queue's workers
--       3 where its jobs are
--       4 Commands of waiting jobs
--       5 scheduled jobs by time
--       6 slots
--       7 how many are taken
--       8 how many jobs wait
--       9 prefix of the waiting lists
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 rules: JSON, a list of those whose jobs it wants
-- Returns -1 when the worker has lost its lease (then nothing was done), else the jobs, as XREADGROUP does, and for each
-- rule how many were given to this worker, and in how many ms its rate lets the next one through, or there is more to
-- look at (0: neither).
local at = use_keys {handed = KEYS[1], jobs = KEYS[3], waiting = KEYS[4], due = KEYS[5], slots = KEYS[6], taken = KEYS[7],
  held = KEYS[8], prefix = KEYS[9]}
if not has_lease(KEYS[2], ARGV[2]) then return -1 end
local total, results = 0, {}
local rules = cjson.decode(ARGV[3])
local given, waits = admit_all(at, rules, {}, ARGV[2])
for n in ipairs(given) do -- bound: the rules of this call, 32 at most
  total, results[n] = total + given[n], {given[n], waits[n]}
end
write(at)
note_unlimited(at, rules)
return {read_admitted(at, ARGV[1], ARGV[2], total), results}
