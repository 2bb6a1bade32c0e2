-- Gates: who may run, who waits, and whose turn it is. A part of the scripts that have to do with gates: they begin with it.
-- Every function takes `at`, a table of the queue's keys by what they hold:
--   jobs, waiting, due   as everywhere
--   slots    stream entry (with its lane's letter) -> the gate and the worker of the job that has a slot: `task token worker`
--   taken    how many slots are taken, by gate (`task token`), and by gate and worker (`task token worker`)
--   held     how many jobs wait, by task; under ' expires' how many of them are in `due`, to expire in time
--   room     prefix of the waiting room: `line <task> <fair> <token>` ZSET of job ids, first come first, in the order of
--            priorities; `tokens <task> <fair>` and `turns <task>` ZSETs of the tokens and the fair keys that have a line,
--            by whose turn it is; `starts <task>`, with ` <worker>` where it is counted by worker, LIST of the last starts
--            of a rate, in ms, with a time to live
--   handed   stream of the lane `handed`
-- Every word (task, token, fair key) has its spaces quoted: protocol/limits.py.
local function count(key, field, by)
  if redis.call('HINCRBY', key, field, by) <= 0 then redis.call('HDEL', key, field) end
end
local function take_slot(at, entry, gate, worker)
  redis.call('HSET', at.slots, entry, gate .. ' ' .. worker)
  count(at.taken, gate, 1)
  count(at.taken, gate .. ' ' .. worker, 1)
end
-- Free the slot of an entry. Gives its task and its token, or nothing where it had none.
local function free_slot(at, entry)
  local slot = redis.call('HGET', at.slots, entry)
  if not slot then return end
  local task, token = string.match(slot, '^([^ ]*) ([^ ]*) ')
  redis.call('HDEL', at.slots, entry)
  count(at.taken, task .. ' ' .. token, -1)
  count(at.taken, slot, -1)
  return task, token
end
-- How many more may run at once.
local function slots_left(at, rule, token, worker)
  if rule.most < 0 then return math.huge end
  local gate = rule.task .. ' ' .. token
  if rule.per_worker then gate = gate .. ' ' .. worker end
  return rule.most - tonumber(redis.call('HGET', at.taken, gate) or 0)
end
local function starts_key(at, rule, worker)
  return at.room .. 'starts ' .. rule.task .. (rule.rate_per_worker and ' ' .. worker or '')
end
-- In how many ms another one may begin, by the rate.
local function begins_in(at, rule, worker, now)
  if rule.rate == 0 then return 0 end
  local last = redis.call('LINDEX', starts_key(at, rule, worker), -rule.rate)
  return last and math.max(0, last + rule.window - now) or 0
end
local function note_start(at, rule, worker, now)
  if rule.rate == 0 then return end
  local key = starts_key(at, rule, worker)
  redis.call('RPUSH', key, now)
  redis.call('LTRIM', key, -rule.rate, -1)
  redis.call('PEXPIRE', key, rule.window)
end
-- Go to the end of those whose turn comes.
local function to_the_end(key, member)
  local last = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  redis.call('ZADD', key, last[2] and last[2] + 1 or 0, member)
end
-- Put jobs into a line: each with its score before it.
local function line_up(at, line, scored)
  local task, fair, token = string.match(line, '^([^ ]*) ([^ ]*) ([^ ]*)$')
  count(at.held, task, redis.call('ZADD', at.room .. 'line ' .. line, unpack(scored)))
  local tokens, turns = at.room .. 'tokens ' .. task .. ' ' .. fair, at.room .. 'turns ' .. task
  if not redis.call('ZSCORE', tokens, token) then to_the_end(tokens, token) end
  if not redis.call('ZSCORE', turns, fair) then to_the_end(turns, fair) end
end
-- A job that waited does not expire where it was.
local function keep(at, id)
  if redis.call('ZREM', at.due, id) == 1 then count(at.held, ' expires', -1) end
end
-- Take a job out of its line; with its last job the line is gone.
local function step_out(at, id, line)
  local task, fair, token = string.match(line, '^([^ ]*) ([^ ]*) ([^ ]*)$')
  local key, tokens = at.room .. 'line ' .. line, at.room .. 'tokens ' .. task .. ' ' .. fair
  if redis.call('ZREM', key, id) == 1 then count(at.held, task, -1) end
  if redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', tokens, token)
    if redis.call('EXISTS', tokens) == 0 then redis.call('ZREM', at.room .. 'turns ' .. task, fair) end
  end
end
-- Hand the first job of a line to a worker: it goes on the lane `handed`, and has a slot.
local function hand_first(at, rule, fair, token, worker, now)
  local line = rule.task .. ' ' .. fair .. ' ' .. token
  local id = redis.call('ZRANGE', at.room .. 'line ' .. line, 0, 0)[1]
  if not id then return false end
  local place, message = redis.call('HGET', at.jobs, id) or '', redis.call('HGET', at.waiting, id)
  local deaths = string.match(place, '^G(%d*) ')
  step_out(at, id, line)
  if not deaths or not message then -- the job is elsewhere, or has ended: it came twice
    if place == '' then redis.call('HDEL', at.waiting, id) end
    return false
  end
  keep(at, id)
  local entry
  if tonumber(deaths) then
    entry = redis.call('XADD', at.handed, '*', 'job', message, 'deliveries', deaths)
  else
    entry = redis.call('XADD', at.handed, '*', 'job', message)
  end
  redis.call('HDEL', at.waiting, id)
  redis.call('HSET', at.jobs, id, 'S' .. entry .. 'g')
  take_slot(at, entry .. 'g', rule.task .. ' ' .. token, worker)
  note_start(at, rule, worker, now)
  return true
end
-- How many lines are looked at whose gates are full, before somebody else gets his turn. Each of them has a job that runs.
local PATIENCE = 1000
-- Hand up to `rule.want` jobs of one task to a worker: first of the gates that have just become free, then in turn. Gives
-- how many, in how many ms the rate lets the next one through, and whether others could go on at once.
local function hand_over(at, rule, free, worker, now)
  local turns, given, looked = at.room .. 'turns ' .. rule.task, 0, 0
  local wait = begins_in(at, rule, worker, now)
  local function hand(fair, token)
    if slots_left(at, rule, token, worker) <= 0 or not hand_first(at, rule, fair, token, worker, now) then return false end
    given, wait = given + 1, begins_in(at, rule, worker, now)
    return true
  end
  for token in pairs(rule.fair and {} or free) do
    while given < rule.want and wait == 0 and hand('', token) do end
  end
  while given < rule.want and wait == 0 and looked < PATIENCE do
    local fair = redis.call('ZRANGE', turns, 0, 0)[1]
    if not fair then break end
    local tokens = at.room .. 'tokens ' .. rule.task .. ' ' .. fair
    local token = redis.call('ZRANGE', tokens, 0, 0)[1]
    if not token then
      redis.call('ZREM', turns, fair)
    else
      to_the_end(turns, fair)
      to_the_end(tokens, token)
      if not hand(fair, token) then looked = looked + 1 end
      if token == '' and slots_left(at, rule, '', worker) <= 0 then break end
    end
  end
  local more = false
  if wait == 0 then
    for token in pairs(free) do
      more = more or slots_left(at, rule, token, worker) > 0 and redis.call('EXISTS', at.room .. 'line ' .. rule.task .. '  ' .. token) == 1
    end
    for _, fair in ipairs(not more and redis.call('ZRANGE', turns, 0, 3) or {}) do
      for _, token in ipairs(redis.call('ZRANGE', at.room .. 'tokens ' .. rule.task .. ' ' .. fair, 0, 3)) do
        more = more or slots_left(at, rule, token, worker) > 0
      end
    end
  elseif redis.call('EXISTS', turns) == 0 then
    wait = 0
  end
  return given, wait, more
end
-- Take what was just handed over, `given` jobs, as the worker's own.
local function take_handed(at, group, worker, given)
  if given == 0 then return {} end
  redis.pcall('XGROUP', 'CREATE', at.handed, group, '0')
  return redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', given, 'STREAMS', at.handed, '>')
end
