-- Virtual clock: what stands in place of the clock in scripts of a process whose time a test sets. The name of the key that has the time
-- stands before it.
-- Return the time in ms since 1970 that a test has set on this server; on any other server its own.
local function now_ms()
  local virtual = redis.call('GET', virtual_time)
  if virtual then return tonumber(virtual) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
