-- Return the overrides of tasks.
-- KEYS  1 limits and rates, by task
--       2 suspended tasks
-- Returns both, each a list of tasks and their overrides.
return {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
