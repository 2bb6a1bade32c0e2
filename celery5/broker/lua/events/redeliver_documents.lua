-- Deliver documents that Data Sinks refused to them again, each by itself.
-- KEYS  1 dead-letter queue
--       2 which sinks take which documents; a sink's stream is named after it, and the channel of this name wakes Routers
-- ARGV  1.. entries in the dead-letter queue
-- Returns for each: 1 it is on its way again; 0 it was not in the dead-letter queue any more. Safe to repeat.
local results = {}
for n, dead_entry in ipairs(ARGV) do -- bound: the jobs of this call
  local there, field = redis.call('XRANGE', KEYS[1], dead_entry, dead_entry)[1], {}
  for at = 1, there and #there[2] or 0, 2 do field[there[2][at]] = there[2][at + 1] end -- bound: the fields of an entry, as its sender wrote them
  results[n] = 0
  if field.sink then
    redis.call('XDEL', KEYS[1], dead_entry)
    redis.call('XADD', KEYS[2] .. ':' .. field.sink, '*', 'document', field.document or '')
    results[n] = 1
  end
end
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
redis.call('PUBLISH', KEYS[2], '')
return results
