-- Admission: which jobs may run within their limits, which wait, and in which order. A part of the scripts that apply
-- limits: they begin with it. A limit holds for a task, or for a task and a key (its token).
-- Every function takes `at`, which `use_keys` makes of a table of the queue's keys by what they hold:
--   jobs, waiting, due   as in all scripts
--   slots    stream entry (with its lane's letter) -> the limit and the worker of the job that has a slot: `task token worker`
--   taken    how many slots are taken, by limit (`task token`), and by limit and worker (`task token worker`)
--   held     how many jobs wait, by task; under ' expires' how many of them are in `due`, to expire in time
--   prefix   prefix of the waiting lists: `line <task> <fair> <token>` ZSET of job ids, by priority, then by age; `tokens <task> <fair>` and `turns <task>` ZSETs of the tokens and the fair keys that have an open
--            list, in the order of their turns; `parked <task> <token>` ZSET of the fair keys whose lists with that token are
--            parked, and `full <task>` ZSET of the tokens that have a parked list, by the limit at which they were full;
--            `starts <task>`, with ` <worker>` where it is counted by worker, LIST of the last starts of a rate, in ms,
--            with a time to live; `unlimited` SET of the tasks whose jobs wait for nothing but a worker with a slot
--   handed   stream of the lane `handed`
-- Every word (task, token, fair key) has its spaces quoted: protocol/limits.py.
--
-- A waiting list is open or parked. A script looks only at open lists. When it finds the limit of an open list full, it
-- parks the list; a script that frees a slot of that limit opens one parked list of it again. So no script looks
-- twice at lists that cannot move, however many keys there are. After every script this is true: a limit with parked
-- lists is full, at the limit that `full` has, or one of its lists is open. `admit_next` opens lists that a higher limit admits. Lists are not
-- parked for a limit per worker: another worker may have a free slot.
--
-- Writes are collected and made at the end, by `write`: one command for many jobs. A script that calls any function of
-- this part ends with it.
local WORDS = 500 -- words of one command
local LOOKS = 32 -- lists that one script parks or opens for one rule; then it asks to be called again
local PAGE = 250 -- lists that are read at once where they are not parked
local PAGES = 4 -- how many pages of them
local NET = 8 -- parked lists that are chosen at random and checked, in one call
local function use_keys(at)
  at.later, at.sums, at.read, at.ends, at.looks, at.unfinished = {}, {}, {}, {}, LOOKS, false
  return at
end
-- Collect the arguments of one command.
local function later(at, command, key, word, value)
  local name = command .. ' ' .. key
  local words = at.later[name]
  if not words then
    words = {command, key}
    at.later[name], at.later[#at.later + 1] = words, words
  end
  words[#words + 1] = word
  if value then words[#words + 1] = value end
end
-- Collect a change of a number in a hash. A field that becomes 0 is deleted.
local function count(at, key, field, by)
  local sums = at.sums[key] or {}
  at.sums[key], sums[field] = sums, (sums[field] or 0) + by
end
-- Write the collected changes of numbers in one hash.
local function write_sums(at, key)
  for field, by in pairs(at.sums[key] or {}) do -- bound: the tasks of the jobs of this script
    if by ~= 0 and redis.call('HINCRBY', key, field, by) <= 0 then
      redis.call('HDEL', key, field)
      if at.prefix then redis.call('SREM', at.prefix .. 'unlimited', field) end
    end
  end
  at.sums[key] = nil
end
-- Remove from `due` the jobs that this script moved: they do not expire in a waiting list any more.
local function write_not_due(at, words)
  for first = 1, #words, WORDS do -- bound: the jobs of this script
    local gone = redis.call('ZREM', at.due, unpack(words, first, math.min(first + WORDS - 1, #words)))
    if gone > 0 then count(at, at.held, ' expires', -gone) end
  end
end
-- Read how many slots of limits are taken, all at once.
local function read_taken(at, limits)
  for first = 1, #limits, WORDS do -- bound: two limits for each job of this call
    local last = math.min(first + WORDS - 1, #limits)
    for n, taken in ipairs(redis.call('HMGET', at.taken, unpack(limits, first, last))) do -- bound: WORDS
      at.read[limits[first + n - 1]] = tonumber(taken or 0)
    end
  end
end
-- Collect the changes of how many slots are taken: what is not read yet is read now.
local function write_taken(at)
  local changed, unread = {}, {}
  for limit, by in pairs(at.sums[at.taken] or {}) do -- bound: two limits for each job of this script
    if by ~= 0 then changed[#changed + 1] = limit end
    if by ~= 0 and not at.read[limit] then unread[#unread + 1] = limit end
  end
  if unread[1] then read_taken(at, unread) end
  for _, limit in ipairs(changed) do -- bound: as above
    local sum = at.read[limit] + at.sums[at.taken][limit]
    if sum > 0 then later(at, 'HSET', at.taken, limit, sum) else later(at, 'HDEL', at.taken, limit) end
  end
  at.sums[at.taken] = nil
end
-- Make all writes that were collected.
local function write(at)
  if at.taken then write_taken(at) end
  for _, words in ipairs(at.later) do -- bound: the kinds of writes, about ten
    for first = 3, #words, WORDS do -- bound: the words of this script's jobs
      redis.call(words[1], words[2], unpack(words, first, math.min(first + WORDS - 1, #words)))
    end
  end
  if at.not_due then write_not_due(at, at.not_due) end
  if at.held then write_sums(at, at.held) end
  at.later, at.not_due, at.read = {}, nil, {}
end
local function take_slot(at, entry, limit, worker)
  later(at, 'HSET', at.slots, entry, limit .. ' ' .. worker)
  count(at, at.taken, limit, 1)
  count(at, at.taken, limit .. ' ' .. worker, 1)
end
-- Return how many slots of a limit are taken, with those that this script has taken and freed.
local function slots_taken(at, limit)
  if not at.read[limit] then at.read[limit] = tonumber(redis.call('HGET', at.taken, limit) or 0) end
  return at.read[limit] + ((at.sums[at.taken] or {})[limit] or 0)
end
-- Return how many more may run at once.
local function slots_left(at, rule, token, worker)
  if rule.most < 0 then return math.huge end
  local limit = rule.task .. ' ' .. token
  if rule.per_worker then limit = limit .. ' ' .. worker end
  return rule.most - slots_taken(at, limit)
end
local function starts_key(at, rule, worker)
  return at.prefix .. 'starts ' .. rule.task .. (rule.rate_per_worker and ' ' .. worker or '')
end
-- Return the time in ms since 1970.
local function now_of(at)
  local time = not at.now and redis.call('TIME')
  at.now = at.now or time[1] * 1000 + math.floor(time[2] / 1000)
  return at.now
end
-- Return in how many ms another job may begin, by the rate of its task.
local function begins_in(at, rule, worker)
  if rule.rate == 0 then return 0 end
  local last = redis.call('LINDEX', starts_key(at, rule, worker), -rule.rate)
  return last and math.max(0, last + rule.window - now_of(at)) or 0
end
local function note_start(at, rule, worker)
  if rule.rate == 0 then return end
  local key = starts_key(at, rule, worker)
  redis.call('RPUSH', key, now_of(at))
  redis.call('LTRIM', key, -rule.rate, -1)
  redis.call('PEXPIRE', key, rule.window)
end
-- Return whether a job of a task waits in any list.
local function somebody_waits(at, task)
  return redis.call('EXISTS', at.prefix .. 'turns ' .. task, at.prefix .. 'full ' .. task) > 0
end
-- Note for each rule whose task has waiting jobs whether these wait for nothing but a slot of a worker: so they are
-- counted with those on the streams, by lane.lua.
local function note_unlimited(at, rules)
  local yes, no = {}, {}
  for _, rule in ipairs(rules) do -- bound: the rules of this call
    if not rule.in_order then
      no[#no + 1] = rule.task
    elseif redis.call('HEXISTS', at.held, rule.task) == 1 then
      yes[#yes + 1] = rule.task
    end
  end
  if yes[1] then redis.call('SADD', at.prefix .. 'unlimited', unpack(yes)) end
  if no[1] then redis.call('SREM', at.prefix .. 'unlimited', unpack(no)) end
end
-- Return a score that is higher than all others of a turn order.
local function end_of(at, key)
  local last = at.ends[key] or redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2] or -1
  at.ends[key] = last + 1
  return last + 1
end
-- Move a member to the end of a turn order.
local function to_the_end(at, key, member)
  redis.call('ZADD', key, end_of(at, key), member)
end
-- Put lists of one fair key into the turn order, at its end, unless they are there.
local function open(at, task, fair, found)
  local tokens, turns = at.prefix .. 'tokens ' .. task .. ' ' .. fair, at.prefix .. 'turns ' .. task
  local scored = {}
  at.nobody_open = false
  for _, token in ipairs(found) do -- bound: the lists of this call
    scored[#scored + 1], scored[#scored + 2] = end_of(at, tokens), token
  end
  redis.call('ZADD', tokens, 'NX', unpack(scored))
  redis.call('ZADD', turns, 'NX', end_of(at, turns), fair)
end
-- Take a list out of the turn order. Returns whether it was there.
local function close(at, task, fair, token)
  local tokens = at.prefix .. 'tokens ' .. task .. ' ' .. fair
  if redis.call('ZREM', tokens, token) == 0 then return false end
  if redis.call('EXISTS', tokens) == 0 then redis.call('ZREM', at.prefix .. 'turns ' .. task, fair) end
  return true
end
-- Park open lists of one fair key whose limits are full at the limit `most`.
local function park(at, task, fair, found, most)
  local tokens, full = at.prefix .. 'tokens ' .. task .. ' ' .. fair, {}
  redis.call('ZREM', tokens, unpack(found))
  if redis.call('EXISTS', tokens) == 0 then redis.call('ZREM', at.prefix .. 'turns ' .. task, fair) end
  for _, token in ipairs(found) do -- bound: LOOKS
    local parked = at.prefix .. 'parked ' .. task .. ' ' .. token
    -- Without fair keys there is one list for each limit.
    if fair == '' then redis.call('ZADD', parked, 0, fair) else to_the_end(at, parked, fair) end
    full[#full + 1], full[#full + 2] = most, token
  end
  redis.call('ZADD', at.prefix .. 'full ' .. task, unpack(full))
end
-- Open the list of a limit that was parked first, if any. Returns whether another one of it is parked.
local function unpark(at, task, token)
  local parked = at.prefix .. 'parked ' .. task .. ' ' .. token
  local fair = redis.call('ZPOPMIN', parked)[1]
  if not fair then return false end
  open(at, task, fair, {token})
  local more = redis.call('EXISTS', parked) == 1
  if not more then redis.call('ZREM', at.prefix .. 'full ' .. task, token) end
  return more
end
-- Free the slots of entries. Returns for each that had one its task and its token.
local function free_slots(at, entries)
  local found, limits = {}, {}
  for first = 1, #entries, WORDS do -- bound: the entries of this call
    local last = math.min(first + WORDS - 1, #entries)
    for n, slot in ipairs(redis.call('HMGET', at.slots, unpack(entries, first, last))) do -- bound: WORDS
      local task, token = string.match(slot or '', '^([^ ]*) ([^ ]*) ')
      if task then
        later(at, 'HDEL', at.slots, entries[first + n - 1])
        count(at, at.taken, task .. ' ' .. token, -1)
        count(at, at.taken, slot, -1)
        limits[#limits + 1], limits[#limits + 2] = task .. ' ' .. token, slot
        found[#found + 1] = {task, token}
      end
    end
  end
  if limits[1] then read_taken(at, limits) end
  return found
end
-- Free the slot of an entry, and open a parked list of its limit. Returns its task, nothing when it had no slot.
local function free_slot(at, entry)
  local freed = free_slots(at, {entry})[1]
  if not freed then return end
  unpark(at, freed[1], freed[2])
  return freed[1]
end
-- Put jobs into their lists. `lists` has the names of the lists, and under each name its jobs, each with its score before
-- it. A new list of a limit that has parked ones is parked behind them.
local function add_to_lists(at, lists)
  local keys, any_full, opened = {}, {}, {}
  for n, list in ipairs(lists) do keys[n] = at.prefix .. 'line ' .. list end -- bound: the jobs of this call
  local all_new = keys[1] and redis.call('EXISTS', unpack(keys)) == 0
  for n, list in ipairs(lists) do -- bound: the jobs of this call
    local task, fair, token = string.match(list, '^([^ ]*) ([^ ]*) ([^ ]*)$')
    local is_new = all_new or redis.call('EXISTS', keys[n]) == 0
    count(at, at.held, task, redis.call('ZADD', keys[n], unpack(lists[list])))
    if is_new then
      local parked, order = at.prefix .. 'parked ' .. task .. ' ' .. token, task .. ' ' .. fair
      if any_full[task] == nil then any_full[task] = redis.call('EXISTS', at.prefix .. 'full ' .. task) == 1 end
      if any_full[task] and redis.call('EXISTS', parked) == 1 then
        to_the_end(at, parked, fair)
      elseif opened[order] then
        table.insert(opened[order], token)
      else
        opened[order] = {token}
        opened[#opened + 1] = {task, fair, opened[order]}
      end
    end
  end
  for _, one in ipairs(opened) do open(at, one[1], one[2], one[3]) end -- bound: the jobs of this call
end
-- Note that a job which waited does not expire in its waiting list.
local function expires_no_more(at, id)
  at.not_due = at.not_due or {}
  at.not_due[#at.not_due + 1] = id
end
-- Take a list out of those that are parked. Returns whether it was there.
local function unpark_list(at, task, fair, token)
  local parked = at.prefix .. 'parked ' .. task .. ' ' .. token
  if redis.call('ZREM', parked, fair) == 0 then return false end
  if redis.call('EXISTS', parked) == 0 then redis.call('ZREM', at.prefix .. 'full ' .. task, token) end
  return true
end
-- Remove a list that its last job has left from the turn order. If it was open, open the next list of its limit.
local function forget_list(at, task, fair, token, is_open)
  if not is_open and unpark_list(at, task, fair, token) then return end
  if close(at, task, fair, token) then
    unpark(at, task, token)
  end
end
-- Take a job out of its list.
local function leave_list(at, id, list)
  local task, fair, token = string.match(list, '^([^ ]*) ([^ ]*) ([^ ]*)$')
  local key = at.prefix .. 'line ' .. list
  if redis.call('ZREM', key, id) == 0 then return end
  count(at, at.held, task, -1)
  if redis.call('EXISTS', key) == 0 then forget_list(at, task, fair, token, false) end
end
-- Give the first job of a list to a worker: it goes on the lane `handed`, and has a slot. Returns whether it did, and
-- whether others are left in the list.
local function admit_first(at, rule, fair, token, worker, is_open)
  local list = at.prefix .. 'line ' .. rule.task .. ' ' .. fair .. ' ' .. token
  local id, score = unpack(redis.call('ZPOPMIN', list))
  if not id then return false, false end
  local place, message = redis.call('HGET', at.jobs, id) or '', redis.call('HGET', at.waiting, id)
  local deaths = string.match(place, '^G(%d*) ')
  count(at, at.held, rule.task, -1)
  -- 2 for the list, 1 for the turn order, in one command.
  local there = redis.call('EXISTS', list, list, at.prefix .. 'turns ' .. rule.task)
  local others = there >= 2
  at.nobody_open = there % 2 == 0
  if not others then forget_list(at, rule.task, fair, token, is_open) end
  if not deaths or not message then -- the job is elsewhere, or has ended: it came twice
    if place == '' then redis.call('HDEL', at.waiting, id) end
    return false, others
  end
  -- Nearly all messages have no `expires`; then the job is not in `due`.
  if string.find(message, 'expires', 1, true) or string.find(message, '\\u', 1, true) then expires_no_more(at, id) end
  -- Since when it could have run, but for its limit, in ms since 1970: the score without the priority.
  local since, entry = string.format('%.0f', math.floor(score % 2e15 / 1000)), nil
  if tonumber(deaths) then
    entry = redis.call('XADD', at.handed, '*', 'job', message, 'deliveries', deaths, 'since', since)
  else
    entry = redis.call('XADD', at.handed, '*', 'job', message, 'since', since)
  end
  later(at, 'HDEL', at.waiting, id)
  later(at, 'HSET', at.jobs, id, 'S' .. entry .. 'g')
  take_slot(at, entry .. 'g', rule.task .. ' ' .. token, worker)
  note_start(at, rule, worker)
  return true, others
end
-- Return the tokens at the head of a fair key's turn order whose limits are full, at most `most` of them.
local function leading_full(at, rule, fair, most)
  local tokens = redis.call('ZRANGE', at.prefix .. 'tokens ' .. rule.task .. ' ' .. fair, 0, most - 1)
  local limits, found = {}, {}
  for n, token in ipairs(tokens) do limits[n] = rule.task .. ' ' .. token end -- bound: LOOKS
  local taken = redis.call('HMGET', at.taken, unpack(limits))
  for n, token in ipairs(tokens) do -- bound: LOOKS
    at.read[limits[n]] = tonumber(taken[n] or 0)
    if slots_left(at, rule, token, '') > 0 then break end
    found[n] = token
  end
  return found
end
-- Find the first open list with a free slot at its limit, and park those before it whose limits are full. Returns its
-- fair key, its token, and whether there are other lists in either order; nothing when there is no such list.
local function first_open(at, rule, worker)
  local turns = at.prefix .. 'turns ' .. rule.task
  if at.nobody_open then return end
  if not rule.keyed and slots_left(at, rule, '', worker) <= 0 then return end -- there is only this limit
  while at.looks > 0 do -- bound: LOOKS, and each of them parks a list
    local fairs = redis.call('ZRANGE', turns, 0, 1)
    if not fairs[1] then return end
    local tokens = redis.call('ZRANGE', at.prefix .. 'tokens ' .. rule.task .. ' ' .. fairs[1], 0, 1)
    if not tokens[1] then
      redis.call('ZREM', turns, fairs[1])
    elseif slots_left(at, rule, tokens[1], worker) > 0 then
      return fairs[1], tokens[1], #fairs > 1, #tokens > 1
    else
      local found = leading_full(at, rule, fairs[1], at.looks)
      park(at, rule.task, fairs[1], found, rule.most)
      at.looks = at.looks - #found + 1
    end
    at.looks = at.looks - 1
  end
  at.unfinished = true
end
-- Do the same for a limit per worker: lists whose limits are full for this worker stay open. If there are more of them
-- than are looked at, they go to the end of the order, and others are looked at the next time.
local function first_open_here(at, rule, worker)
  local turns, pages, skip = at.prefix .. 'turns ' .. rule.task, 0, at.skip
  if not rule.keyed and slots_left(at, rule, '', worker) <= 0 then return end
  local fairs = redis.call('ZRANGE', turns, 0, PAGE - 1)
  for _, fair in ipairs(fairs) do -- bound: PAGES
    local key, from = at.prefix .. 'tokens ' .. rule.task .. ' ' .. fair, skip[fair] or 0
    repeat -- bound: PAGES, of all fair keys together
      if pages == PAGES then return end
      pages = pages + 1
      local tokens, limits = redis.call('ZRANGE', key, from, from + PAGE - 1), {}
      for n, token in ipairs(tokens) do limits[n] = rule.task .. ' ' .. token .. ' ' .. worker end -- bound: PAGE
      local taken = tokens[1] and redis.call('HMGET', at.taken, unpack(limits)) or {}
      for n, token in ipairs(tokens) do -- bound: PAGE
        at.read[limits[n]] = tonumber(taken[n] or 0)
        if slots_left(at, rule, token, worker) > 0 then
          skip[fair] = from + n - 1
          return fair, token, #fairs > 1, from > 0 or #tokens > 1
        end
      end
      from = from + #tokens
      skip[fair] = from
      if pages == PAGES then
        local scored = {}
        for _, token in ipairs(tokens) do -- bound: PAGE
          scored[#scored + 1], scored[#scored + 2] = end_of(at, key), token
        end
        if scored[1] then redis.call('ZADD', key, unpack(scored)) end
        to_the_end(at, turns, fair)
      end
    until #tokens < PAGE
  end
end
-- Open lists that this rule's limit admits though they were parked at another limit. A few more are chosen at random: if
-- a version that does not know parked lists has freed a slot, their jobs still run.
local function reopen(at, rule)
  local full = at.prefix .. 'full ' .. rule.task
  local any = rule.most < 0 or rule.per_worker
  local tokens = redis.call('ZRANGEBYSCORE', full, '-inf', any and '+inf' or '(' .. rule.most, 'LIMIT', 0, LOOKS)
  for _, token in ipairs(tokens) do -- bound: LOOKS
    if unpark(at, rule.task, token) and not any then redis.call('ZADD', full, rule.most, token) end
  end
  if any or #tokens == LOOKS then at.unfinished = at.unfinished or #tokens > 0 end
  local drawn, limits = any and {} or redis.call('ZRANDMEMBER', full, NET), {}
  for n, token in ipairs(drawn) do limits[n] = rule.task .. ' ' .. token end -- bound: NET
  for n, taken in ipairs(drawn[1] and redis.call('HMGET', at.taken, unpack(limits)) or {}) do -- bound: NET
    if tonumber(taken or 0) < rule.most then unpark(at, rule.task, drawn[n]) end
  end
end
-- Give up to `rule.want` jobs of one task to a worker: first of the limits that have just become free (`free`: how many
-- slots, by token), then in turn. Returns how many, in how many ms the rate admits the next one or this is to be called
-- again, and whether other jobs could run at once.
local function admit_next(at, rule, free, worker)
  local given, wait = 0, begins_in(at, rule, worker)
  local first = rule.per_worker and first_open_here or first_open
  at.looks, at.unfinished, at.skip, at.nobody_open = LOOKS, false, {}, false
  local function may() return given < rule.want and wait == 0 end
  -- Admit the first job of a list. Returns whether others are left in it, and whether they may run, too.
  local function admit_one(fair, token, is_open)
    local done, others = admit_first(at, rule, fair, token, worker, is_open)
    if done then given, wait = given + 1, begins_in(at, rule, worker) else at.looks = at.looks - 1 end
    return others, slots_left(at, rule, token, worker) > 0
  end
  for token, slots in pairs(free) do -- bound: the jobs that were settled
    local others, left = not rule.fair, slots_left(at, rule, token, worker) > 0
    local before = given
    while others and left and may() and at.looks > 0 do -- bound: rule.want, and LOOKS
      others, left = admit_one('', token)
    end
    for _ = given - before + 1, slots do -- bound: the jobs that were settled
      if not unpark(at, rule.task, token) then break end
    end
  end
  if not at.settles then reopen(at, rule) end
  local fair, token, more_fairs, more_tokens
  while may() do -- bound: rule.want, and LOOKS
    fair, token, more_fairs, more_tokens = first(at, rule, worker)
    if not fair then break end
    local others, left = admit_one(fair, token, true)
    if others and not left and not rule.per_worker then
      park(at, rule.task, fair, {token}, rule.most)
    elseif others and more_tokens then
      to_the_end(at, at.prefix .. 'tokens ' .. rule.task .. ' ' .. fair, token)
    end
    -- Later lists of the same limit are not skipped while it has free slots.
    if left and rule.fair and rule.keyed then unpark(at, rule.task, token) end
    if more_fairs and redis.call('ZSCORE', at.prefix .. 'turns ' .. rule.task, fair) then
      to_the_end(at, at.prefix .. 'turns ' .. rule.task, fair)
    end
  end
  local more = false
  if wait > 0 then
    if not somebody_waits(at, rule.task) then wait = 0 end
  elseif given == rule.want then
    more = at.settles and not rule.suspended and (first(at, rule, worker) ~= nil or at.unfinished)
  elseif at.unfinished then
    wait = 1
  end
  return given, wait, more
end
-- Give jobs of tasks without limits to a worker, in the order of their queue: by priority, then by age. Each of their
-- rules wants some jobs; together they get as many, of whichever task is first. Adds to `given`, by number of the rule.
-- Returns how many they did not get.
local function admit_in_order(at, rules, given, worker)
  local heads, want = {}, 0
  local function look(n)
    local line = at.prefix .. 'line ' .. rules[n].task .. '  '
    heads[n] = tonumber(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
  end
  for n, rule in ipairs(rules) do -- bound: the rules of this call
    if rule.in_order then want = want + rule.want end
  end
  if want == 0 then return 0 end
  for n, rule in ipairs(rules) do -- bound: as above
    if rule.in_order then look(n) end
  end
  local looks = LOOKS
  while want > 0 and looks > 0 do -- bound: what the rules want, and LOOKS
    local first
    for n, head in pairs(heads) do -- bound: the rules of this call
      if not first or head < heads[first] then first = n end
    end
    if not first then break end
    if admit_first(at, rules[first], '', '', worker, false) then
      given[first], want = given[first] + 1, want - 1
    else
      looks = looks - 1
    end
    look(first)
  end
  return want
end
-- Give waiting jobs to a worker, for each rule up to `rule.want`. `freed`: the slots that have just become free, by task
-- and token. Returns for each rule how many it got and in how many ms it is to be asked for again, as `admit_next` does,
-- and whether other jobs of it could run at once.
local function admit_all(at, rules, freed, worker)
  local given, waits, more = {}, {}, {}
  for n in ipairs(rules) do given[n], waits[n] = 0, 0 end -- bound: the rules of this call
  local left = admit_in_order(at, rules, given, worker)
  for n, rule in ipairs(rules) do -- bound: as above
    if not rule.in_order then
      given[n], waits[n], more[n] = admit_next(at, rule, freed[rule.task] or {}, worker)
    elseif left > 0 and somebody_waits(at, rule.task) then -- in lists by keys, of a limit that it had
      rule.want = left
      local got
      got, waits[n] = admit_next(at, rule, {}, worker)
      given[n], left = given[n] + got, left - got
    end
  end
  return given, waits, more
end
-- Read the `given` jobs that were just put on the lane `handed`, so that they are pending for this worker.
local function read_admitted(at, group, worker, given)
  if given == 0 then return {} end
  local taken = redis.pcall('XREADGROUP', 'GROUP', group, worker, 'COUNT', given, 'STREAMS', at.handed, '>')
  if not taken.err then return taken end
  redis.pcall('XGROUP', 'CREATE', at.handed, group, '0')
  return redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', given, 'STREAMS', at.handed, '>')
end
