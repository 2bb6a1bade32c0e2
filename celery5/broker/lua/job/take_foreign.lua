-- Give a worker foreign jobs that its code may be able to run: they go on the lane `handed`, and have no slot.
-- KEYS  1 stream of the lane `handed`
--       2 leases of its workers
--       3 where its jobs are; what is known of code and of foreign jobs is named after it (lib/foreign.lua)
--       4 Commands of waiting jobs
--       5 scheduled jobs by time
-- ARGV  1 consumer group
--       2 this worker's name in it
--       3 the version of its code
--       4 how many jobs at most
-- Returns the jobs, as XREADGROUP does; none when the worker has lost its lease. A job that waits no more until
-- the time that its list has, since it was kept again meanwhile, is taken off the list.
local handed, jobs, waiting, due = KEYS[1], KEYS[3], KEYS[4], KEYS[5]
local group, me, version, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local LISTS = 32
if not has_lease(KEYS[2], me) then return {} end
local index, own = jobs .. ':foreign', redis.call('HGETALL', jobs .. ':code:' .. version)
local function quote(task) return (string.gsub(string.gsub(task, '%%', '%%25'), ' ', '%%20')) end
-- The lists of our tasks that our own signature is not in.
local lists = {}
local function add_lists(first, last)
  local names = {}
  for n = first, last, 2 do names[#names + 1] = quote(own[n]) end -- bound: 500
  for n, found in ipairs(redis.call('HMGET', index, unpack(names))) do -- bound: 500
    for signatures in string.gmatch(found or '', '[^ ]+') do -- bound: FOREIGN_LISTS
      local ours = ',' .. own[first + 2 * n - 1] .. ','
      if #lists < LISTS and not string.find(',' .. signatures .. ',', ours, 1, true) then
        lists[#lists + 1] = {names[n], signatures}
      end
    end
  end
end
for first = 1, #own, 1000 do add_lists(first, math.min(first + 998, #own - 1)) end -- bound: the tasks of an application
local found, share = {}, math.ceil(most / math.max(#lists, 1))
for _, list in ipairs(lists) do -- bound: LISTS
  local key = jobs .. ':foreign:' .. list[1] .. ' ' .. list[2]
  local first = redis.call('ZRANGE', key, 0, share - 1, 'WITHSCORES')
  for n = 1, #first, 2 do found[#found + 1] = {first[n], tonumber(first[n + 1]), key} end -- bound: ARGV 4
end
table.sort(found, function(one, other) return one[2] < other[2] end)
local function give(id, score, key)
  redis.call('ZREM', key, id)
  local place, message = redis.call('HGET', jobs, id) or '', redis.call('HGET', waiting, id)
  local when, deaths = tonumber(redis.call('ZSCORE', due, id) or -1), string.match(place, '^H(%d*)%a?$')
  if not deaths or not message or when ~= due_of_foreign(score) then return 0 end
  redis.call('ZREM', due, id)
  redis.call('HDEL', waiting, id)
  local entry = redis.call('XADD', handed, '*', 'job', message, 'deliveries', deaths == '' and '0' or deaths, 'foreign', '1')
  redis.call('HSET', jobs, id, 'S' .. entry .. 'g')
  return 1
end
local given = 0
for n, one in ipairs(found) do -- bound: ARGV 4, and LISTS
  if n > most then break end
  given = given + give(one[1], one[2], one[3])
end
for _, list in ipairs(lists) do forget_if_empty(jobs, list[1], list[2]) end -- bound: LISTS
if given == 0 then return {} end
redis.pcall('XGROUP', 'CREATE', handed, group, '0')
return redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', given, 'STREAMS', handed, '>')
