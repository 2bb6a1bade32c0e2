-- Foreign: a part of the scripts that keep foreign jobs, those that the code of some workers cannot run: they begin with it.
-- Beside `due` and its place, such a job is in a list of those that the same code could not run. All keys are named after
-- `jobs`, and have a time to live; LIST is a task and the signatures of it that could not read the jobs, in two words:
--   :foreign         HASH of which lists there are: task -> signatures of each list, with a space between
--   :foreign:LIST    ZSET of the ids of jobs, by priority, then by the time at which they are due
--   :code            ZSET of the versions of the code of live workers, by when they are to be announced again
--   :code:VERSION    HASH of the tasks of a version: name -> the digest of its signature
local FOREIGN_LISTS = 16 -- lists of one task
local FOREIGN_LEVEL = 4e12 -- more than any time in ms until 2096; so the score is exact to 1/256
local FOREIGN_KEPT = 60000 -- ms that the lists outlast the jobs
local function keep_for(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end
-- The score of a job: by its lane, then by when it is due, then by how many were in the list before it.
local function foreign_score(lane, when, number)
  return string.format('%.8f', (({h = 0, l = 2})[lane] or 1) * FOREIGN_LEVEL + when + math.min(number, 255) / 256)
end
-- Put jobs into a list. `found` has the lane of each job, when it is due, and its id.
local function add_foreign(jobs, list, found, ms)
  local task, signatures = string.match(list, '^([^ ]+) ([^ ]+)$')
  local index, key = jobs .. ':foreign', jobs .. ':foreign:' .. list
  local before, scored = redis.call('ZCARD', key), {}
  for n, one in ipairs(found) do -- bound: the outcomes of one call
    scored[#scored + 1], scored[#scored + 2] = foreign_score(one[1], one[2], before + n), one[3]
  end
  redis.call('ZADD', key, unpack(scored))
  keep_for(key, ms + FOREIGN_KEPT)
  local lists, known, count = redis.call('HGET', index, task) or '', false, 0
  for each in string.gmatch(lists, '[^ ]+') do -- bound: FOREIGN_LISTS
    known, count = known or each == signatures, count + 1
  end
  -- Beyond that nobody is told; the jobs go back to their queue when they are due.
  if not known and count < FOREIGN_LISTS then redis.call('HSET', index, task, lists .. ' ' .. signatures) end
  keep_for(index, ms + FOREIGN_KEPT)
end
-- Return when a job of a list is due.
local function due_of_foreign(score) return math.floor(score % FOREIGN_LEVEL) end
-- Take a list off the index when it is empty.
local function forget_if_empty(jobs, task, signatures)
  local index, left = jobs .. ':foreign', {}
  if redis.call('EXISTS', index .. ':' .. task .. ' ' .. signatures) == 1 then return end
  for each in string.gmatch(redis.call('HGET', index, task) or '', '[^ ]+') do -- bound: FOREIGN_LISTS
    if each ~= signatures then left[#left + 1] = each end
  end
  if left[1] then redis.call('HSET', index, task, table.concat(left, ' ')) else redis.call('HDEL', index, task) end
end
-- Take held jobs that are held no more off the lists that they are in. Their messages, which name their tasks, are not read.
local function leave_foreign(jobs, ids)
  local lists = ids[1] and redis.pcall('HGETALL', jobs .. ':foreign') or {}
  for n = 1, lists.err and 0 or #lists, 2 do -- bound: the tasks of the application
    for signatures in string.gmatch(lists[n + 1], '[^ ]+') do -- bound: FOREIGN_LISTS
      redis.call('ZREM', jobs .. ':foreign:' .. lists[n] .. ' ' .. signatures, unpack(ids))
      forget_if_empty(jobs, lists[n], signatures)
    end
  end
end
