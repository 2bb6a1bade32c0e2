-- Renew the membership of one worker in a group, assign the partitions, and take those that are free.
-- KEYS  1 map of the stream
--       2 its groups
--       3 members of the group
--       4 the incarnation of each
--       5 plan of the group
--       6 prefix of its partitions
--       7 prefix of the logs
-- ARGV  1 name of the group
--       2 this member
--       3 its incarnation
--       4 lease in ms
--       5 1 when it joins, which ends an earlier incarnation of the same member
--       6 where a new group starts: $ for the end, else the first id
--       7 number of partitions of a stream that does not exist yet
--       8 channel of the group
--       9 1 to wake the others: this member has read up to a border
--       10 1 when it is about to leave: it keeps what it owns, under a name that gets no share
-- Returns {'replaced'} when another incarnation has this member's name, else {'ok', number of partitions, version of the
-- map, members, ms until the next lease of another member ends (-1 for none), partitions, claimed}. For each partition that is
-- assigned to this member: number, 1 when it is its owner, epoch, cursor, how many owners died at this record, condition
-- ('' or quarantined), the ids beyond the cursor that are done, up to which id it may be read ('' for all), the id
-- at which others wait for it, and the last id that there was when the last owner died ('' for none). `claimed` are the partitions that this member owns and another one waits for: it may not know
-- that it owns them, when the reply by which it became the owner was lost and the plan has changed since.
local map, groups, members, incarnations, plans, partitions, logs = unpack(KEYS)
local group, member, incarnation, lease, channel = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[8]
local now = now_ms()
if ARGV[10] == '1' then
  if redis.call('HGET', incarnations, member) == incarnation then
    redis.call('HDEL', incarnations, member)
    redis.call('ZREM', members, member)
  end
  member = LEAVING .. member
end
local other = redis.call('HGET', incarnations, member)
local mine = tonumber(redis.call('ZSCORE', members, member) or 0)
if ARGV[5] ~= '1' and other and other ~= incarnation then return {'replaced'} end
if not redis.call('HGET', map, 'partitions') then redis.call('HSET', map, 'partitions', ARGV[7], 'version', 1) end
local count, total, version, border_text = count_partitions(map)
if redis.call('HEXISTS', groups, group) == 0 then
  redis.call('HSET', groups, group, ARGV[6])
  for p = 0, total - 1 do -- bound: the partitions
    redis.call('HSET', partitions .. p, 'cursor', cursor_before(logs .. p, ARGV[6]))
  end
end
-- A member whose own lease has lapsed, as all have when Redis was down, judges no other: they get a moment to come back.
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', now)) do -- bound: the members of the group
  if mine >= now then
    redis.call('ZREM', members, lapsed)
    redis.call('HDEL', incarnations, lapsed)
  else
    redis.call('ZADD', members, now + math.min(lease / 3, 2000), lapsed)
  end
end
redis.call('ZADD', members, now + lease, member)
redis.call('HSET', incarnations, member, incarnation)
local present = {}
for _, each in ipairs(redis.call('ZRANGE', members, 0, -1)) do -- bound: the members of the group
  if not is_leaving(each) then table.insert(present, each) end
end
table.sort(present)
local living = {}
for _, each in ipairs(redis.call('HVALS', incarnations)) do living[each] = true end -- bound: the members of the group
-- Plan again when the members or the partitions are others than the plan was made of.
local wanted = total .. ' ' .. table.concat(present, ' ')
local plan = {}
local flat = redis.call('HGETALL', plans)
for n = 1, #flat, 2 do plan[flat[n]] = flat[n + 1] end -- bound: the partitions
if plan.members ~= wanted and #present > 0 then
  local words = {'members', wanted}
  for each, held in pairs(make_plan(present, total, plan)) do -- bound: the members of the group
    for _, p in ipairs(held) do -- bound: the partitions
      words[#words + 1], words[#words + 2] = p, each
      plan[tostring(p)] = each
    end
  end
  redis.call('DEL', plans)
  for n = 1, #words, 1000 do redis.call('HSET', plans, unpack(words, n, math.min(n + 999, #words))) end -- bound: the partitions
  redis.call('PUBLISH', channel, 'plan')
  plan.claims = nil
elseif ARGV[9] == '1' then
  redis.call('PUBLISH', channel, 'border')
end
-- By partition the owner that a member has waited for. The owner finds it here, without a look at each partition.
local claims, has_new_claims = plan.claims and cjson.decode(plan.claims) or {}, false
local claimed = {}
for p, owner in pairs(claims) do -- bound: the partitions
  if owner == incarnation then
    if redis.call('HGET', partitions .. p, 'owner') == incarnation and plan[p] ~= member then claimed[#claimed + 1] = tonumber(p) end
    claims[p], has_new_claims = nil, true
  end
end
local cursors = {}
local function cursor_of(p)
  cursors[p] = cursors[p] or redis.call('HGET', partitions .. p, 'cursor') or '0-0'
  return cursors[p]
end
local get_border = make_borders(border_text, cursor_of, logs)
local reply = {}
for p = 0, total - 1 do -- bound: the partitions
  if plan[tostring(p)] == member then
    local key = partitions .. p
    local found = redis.call('HMGET', key, 'owner', 'epoch', 'deaths', 'condition', 'ahead', 'trial', 'suspect')
    local owner, epoch, deaths = found[1] or '', tonumber(found[2]) or 0, tonumber(found[3]) or 0
    if owner ~= incarnation and not living[owner] then
      if owner ~= '' and is_suspect(deaths, found[2], found[6], cursor_of(p), logs .. p) then
        deaths, found[7] = deaths + 1, last_id(logs .. p)
        redis.call('HSET', key, 'suspect', found[7])
      end
      owner, epoch = incarnation, epoch + 1
      redis.call('HSET', key, 'owner', owner, 'epoch', epoch, 'deaths', deaths)
      if not redis.call('HGET', key, 'cursor') then redis.call('HSET', key, 'cursor', cursor_of(p)) end
    elseif owner ~= incarnation and claims[tostring(p)] ~= owner then
      claims[tostring(p)], has_new_claims = owner, true
    end
    local limit, awaited = get_border(p)
    reply[#reply + 1] = {p, owner == incarnation and 1 or 0, epoch, cursor_of(p), deaths, found[4] or '', found[5] or '', limit, awaited, found[7] or ''}
  end
end
if has_new_claims and not next(claims) then redis.call('HDEL', plans, 'claims') end
if has_new_claims and next(claims) then redis.call('HSET', plans, 'claims', cjson.encode(claims)) end
local lapse_in = -1
local first = redis.call('ZRANGE', members, 0, 1, 'WITHSCORES')
for n = 1, #first, 2 do -- bound: two members
  if first[n] ~= member and lapse_in < 0 then lapse_in = math.max(0, math.ceil(first[n + 1] - now)) end
end
return {'ok', count, version, #present, lapse_in, reply, claimed}
