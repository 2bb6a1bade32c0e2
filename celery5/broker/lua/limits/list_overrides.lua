-- Return the overrides of tasks.
-- KEYS  1 limits and rates, by task
--       2 suspended tasks
--       3 what the Scheduler imposes by its rules
-- Returns the first two, each a list of tasks and their overrides; what is imposed ('' for nothing), and the ms for
-- which it holds.
local imposed = redis.call('GET', KEYS[3])
return {
  redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]),
  imposed or '', imposed and redis.call('PTTL', KEYS[3]) or 0
}
