-- Say what is to become of parked keys of a group.
-- KEYS  1 its parked keys
-- ARGV  1 release or discard; - to leave them where they are
--       2 channel of the group
--       3.. the keys, none for all
-- Returns how many keys were found.
local fields, found = {}, 0
for n = 3, #ARGV do fields[#fields + 1] = 'key:' .. ARGV[n] end -- bound: the keys of one call
if #fields == 0 then fields = redis.call('HKEYS', KEYS[1]) end
for _, field in ipairs(fields) do -- bound: the parked keys of a group, 1,000 at most, and their tries
  local about = string.sub(field, 1, 4) == 'key:' and redis.call('HGET', KEYS[1], field)
  if about then
    found = found + 1
    redis.call('HSET', KEYS[1], field, (string.gsub(about, '^%S+', ARGV[1])))
    redis.call('HDEL', KEYS[1], 'tries:' .. string.sub(field, 5))
  end
end
if found > 0 then redis.call('PUBLISH', ARGV[2], 'parked') end
return found
