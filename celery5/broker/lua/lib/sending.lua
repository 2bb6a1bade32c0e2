-- Sending: what the scripts that put jobs on a lane share: they begin with it.
-- Return the id of the live job that has a key, nothing when the key is free. A job that has ended, is dead, or is not known any more
-- has no key.
local function find_holder(unique, jobs, lock)
  local holder = redis.call('HGET', unique, lock)
  local place = holder and redis.call('HGET', jobs, holder)
  if place and string.sub(place, 1, 1) ~= 'X' then return holder end
end
-- Return whether a lane is new: no worker reads it before its first job is announced.
local function is_new_lane(stream, lane)
  return lane ~= '' and redis.call('EXISTS', stream) == 0
end
-- Put a job on its lane.
local function send(stream, jobs, lane, id, message)
  redis.call('HSET', jobs, id, 'S' .. redis.call('XADD', stream, '*', 'job', message) .. lane)
end
