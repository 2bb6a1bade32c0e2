-- Append an entry to the audit trail of an application, and trim the trail.
-- A full trail loses its oldest entry; one of a person who has more than a share of it loses that person's oldest. So
-- nobody can wash out what others have done.
-- KEYS  1 audit trail
--       2 its entries by person
-- ARGV  1 how many entries stay
--       2 how many of them one person may have when the trail is full
--       3 ttl in ms
--       4 who has acted
--       5.. fields of the entry and their values, in turns
-- Returns the id of the entry, which has the time of this server.
local MOST_REMOVED = 100

local function person_of(entry)
  local fields = entry[2]
  for i = 1, #fields, 2 do -- bound: the eight fields of an entry
    if fields[i] == 'who' then return fields[i + 1] end
  end
  return ''
end

local function remove(id, person)
  redis.call('XDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], person .. '\0' .. id)
end

local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 5))
redis.call('ZADD', KEYS[2], 0, ARGV[4] .. '\0' .. id)
local first, last = '[' .. ARGV[4] .. '\0', '(' .. ARGV[4] .. '\1'
local excess = redis.call('XLEN', KEYS[1]) - tonumber(ARGV[1])
if excess > 0 then
  if redis.call('ZLEXCOUNT', KEYS[2], first, last) > tonumber(ARGV[2]) then
    local oldest = redis.call('ZRANGEBYLEX', KEYS[2], first, last, 'LIMIT', 0, 1)[1]
    remove(string.sub(oldest, #ARGV[4] + 2), ARGV[4])
    excess = excess - 1
  end
  if excess > 0 then
    local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', math.min(excess, MOST_REMOVED))
    for _, entry in ipairs(oldest) do -- bound: MOST_REMOVED
      remove(entry[1], person_of(entry))
    end
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return id
