-- Settle a batch in which jobs have slots: as settle.lua, which is a part of this script. Then their slots are free, and
-- jobs that wait for them are given to this worker, as far as it has capacity.
-- KEYS  1 stream of the lane `handed`
--       2 where the queue's jobs are
--       3 Commands of waiting jobs
--       4 scheduled jobs by time
--       5 slots
--       6 how many are taken
--       7 how many jobs wait
--       8 prefix of the waiting lists
--       9.. what settle.lua takes
-- ARGV  1 channel that notifies workers of free slots
--       2 rules: JSON, a list of those of the batch's jobs, and of others whose jobs are wanted, too
--       3 entries that have slots: JSON, a list
--       4.. what settle.lua takes
-- Returns what settle.lua does, the jobs that were given to this worker, as XREADGROUP does, and for each rule how many of
-- them are of its task, and in how many ms its rate admits the next one, or the call is to be repeated (0: neither). An
-- entry that is settled has no slot any more, so the call may be repeated; the jobs of a lost reply are pending for this
-- worker.
local at = use_keys {settles = true, handed = KEYS[1], jobs = KEYS[2], waiting = KEYS[3], due = KEYS[4], slots = KEYS[5], taken = KEYS[6],
  held = KEYS[7], prefix = KEYS[8]}
local keys, argv = {}, {}
for n = 9, #KEYS do keys[n - 8] = KEYS[n] end -- bound: the words of this call
for n = 4, #ARGV do argv[n - 3] = ARGV[n] end -- bound: the words of this call
local freed, total, results = {}, 0, {}
local limits = free_slots(at, cjson.decode(ARGV[3]))
for _, limit in ipairs(limits) do -- bound: the outcomes of this call, 32 at most
  local task, token = limit[1], limit[2]
  freed[task] = freed[task] or {}
  freed[task][token] = (freed[task][token] or 0) + 1
end
argv.all_have_slots = #limits == #keys - 8 -- keys: eight, and one for each outcome
local owned = settle(keys, argv)
if owned < 0 then return {owned, {}, {}} end -- what was freed is not written yet
local rules = cjson.decode(ARGV[2])
local given, waits, more = admit_all(at, rules, freed, argv[2])
for n, rule in ipairs(rules) do -- bound: the tasks of these outcomes, and 32 others
  if more[n] and not rule.suspended then redis.call('PUBLISH', ARGV[1], rule.task) end
  freed[rule.task] = nil
  total, results[n] = total + given[n], {given[n], waits[n]}
end
-- Other workers may know the rule of a task that this worker does not know any more.
for task, tokens in pairs(freed) do -- bound: the tasks of these outcomes
  for token, slots in pairs(tokens) do -- bound: the outcomes of this call
    for _ = 1, slots do -- bound: the outcomes of this call
      if not unpark(at, task, token) then break end
    end
  end
  if redis.call('EXISTS', at.prefix .. 'turns ' .. task) == 1 then redis.call('PUBLISH', ARGV[1], task) end
end
write(at)
return {owned, read_admitted(at, argv[1], argv[2], total), results}
