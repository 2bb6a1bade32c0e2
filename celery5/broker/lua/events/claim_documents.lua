-- Give a Router documents for a Data Sink: those whose time has come to be tried again, or whose Router has gone, then
-- new ones. The Router has them for a while; then any Router may claim them.
-- KEYS  1 documents of the sink
--       2 documents that a Router has, or that wait for another try, by the time when they may be claimed
--       3 the last one that was taken, and how often each was tried without success
-- ARGV  1 how many, at most
--       2 how many bytes, at most, unless one alone has more
--       3 for how long in ms
-- Returns the documents, each with its entry and how often it was tried without success, and in how many ms the next
-- document that cannot be claimed now may be claimed (-1 when there is none).
local stream, taken, progress = KEYS[1], KEYS[2], KEYS[3]
local most, space = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = now_ms()
local found = {}
local function is_full() return #found >= most or space <= 0 end
local function give(entry, fields)
  local document = ''
  for n = 1, #fields, 2 do -- bound: the fields of an entry, as its sender wrote them
    if fields[n] == 'document' then document = fields[n + 1] end
  end
  if #found > 0 and #document > space then
    space = 0
    return false
  end
  space = space - #document
  found[#found + 1] = {entry, document, tonumber(redis.call('HGET', progress, entry)) or 0}
  redis.call('ZADD', taken, now + tonumber(ARGV[3]), entry)
  return true
end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', taken, '-inf', now, 'LIMIT', 0, most)) do -- bound: ARGV 1
  local there = redis.call('XRANGE', stream, entry, entry)[1]
  if not there then
    redis.call('ZREM', taken, entry)
    redis.call('HDEL', progress, entry)
  elseif is_full() or not give(entry, there[2]) then
    break
  end
end
local cursor = redis.call('HGET', progress, 'last')
while not is_full() do -- bound: ARGV 1, and ARGV 2
  local some = redis.call('XRANGE', stream, cursor and '(' .. cursor or '-', '+', 'COUNT', math.min(10, most - #found))
  if #some == 0 then break end
  for _, one in ipairs(some) do -- bound: ten entries
    if not give(one[1], one[2]) then break end
    cursor = one[1]
  end
  redis.call('HSET', progress, 'last', cursor)
end
local next = redis.call('ZRANGEBYSCORE', taken, '(' .. now, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
return {found, next and math.max(0, tonumber(next) - now) or -1}
