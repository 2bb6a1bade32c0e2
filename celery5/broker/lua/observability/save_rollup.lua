-- Save some groups of metrics, each as a whole, unless another process has saved one of them.
-- KEYS  1 where the rollup is
--       2 prefix of the streams of minutes, followed by the group
--       3 prefix of the streams of hours, followed by the group
-- ARGV  1 ms that the rollup lives
--       2 ms that minutes are kept
--       3 ms that hours are kept
--       4.. for each group: name, its mark before and after, the number of changes; then each change of four words:
--           'set', field, value, ''; 'del', field, '', ''; 'minutes' or 'hours', group, ms, value
-- Returns 1, or 0 when the mark of one is another than expected: then nothing is changed.
local state, prefixes = KEYS[1], {minutes = KEYS[2], hours = KEYS[3]}
local kept = {minutes = ARGV[2], hours = ARGV[3]}
local at = 4
while at <= #ARGV do -- bound: the groups of this call
  if (redis.call('HGET', state, 'mark:' .. ARGV[at]) or '') ~= ARGV[at + 1] then return 0 end
  at = at + 4 + 4 * tonumber(ARGV[at + 3])
end
local function add_chunk(tier, group, time, value)
  local stream = prefixes[tier] .. group
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local ms = last and tonumber(string.match(last[1], '^%d+')) or -1
  -- A chunk that was packed before has a late part: it follows under the next id, and readers add up what is of one time.
  local id = tonumber(time) > ms and time .. '-0' or string.format('%.0f', ms) .. '-' .. (tonumber(string.match(last[1], '%d+$')) + 1)
  redis.call('XADD', stream, 'MINID', '~', string.format('%.0f', tonumber(time) - kept[tier]), id, 'at', time, 'points', value)
  redis.call('PEXPIRE', stream, kept[tier])
end
at = 4
while at <= #ARGV do -- bound: the groups of this call
  redis.call('HSET', state, 'mark:' .. ARGV[at], ARGV[at + 2])
  local first = at + 4
  at = first + 4 * tonumber(ARGV[at + 3])
  for n = first, at - 1, 4 do -- bound: the changes of one group
    local what, name, third, value = ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3]
    if what == 'set' then
      redis.call('HSET', state, name, third)
    elseif what == 'del' then
      redis.call('HDEL', state, name)
    else
      add_chunk(what, name, third, value)
    end
  end
end
redis.call('PEXPIRE', state, ARGV[1])
return 1
