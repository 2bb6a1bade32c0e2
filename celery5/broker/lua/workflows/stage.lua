-- Put a portion of the items of a map beside a run: one that is not live yet, or whose map waits for them.
-- KEYS  1 the run
--       2 the items
--       3 idle runs
-- ARGV  1 how many items come before this portion
--       2 ttl in ms: what is not started in this time is gone
--       3 the id of the run
--       4 the node that waits for them; '' when the run is not live yet
--       5 how often that was started again
--       6.. the items
-- Returns how many items there are now; -1 when the run does not take them; -2 when portions are missing. Safe to repeat.
local n, fields = ARGV[4], nil
local function get(name)
  local value = redis.call('HGET', KEYS[1], name)
  if value then return value end
  fields = fields or unpack_run(redis.call('HGET', KEYS[3], ARGV[3]) or cmsgpack.pack({}))
  return fields[name]
end
if n == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('HEXISTS', KEYS[3], ARGV[3]) == 1 then return -1 end
else
  local word, generation = string.match(get('node:' .. n) or '', '^(%a+) ?(%d*)$')
  local waits = (word == 'active' or word == 'held') and (generation == '' and '0' or generation) == ARGV[5]
  if not waits or get('state') ~= 'live' or get('total:' .. n) then return -1 end
end
local before, length = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
if length < before then return -2 end
if length == before and #ARGV > 5 then length = redis.call('RPUSH', KEYS[2], unpack(ARGV, 6)) end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return length
