-- Save what reports were rolled up to, all at once, so that each report counts once.
-- KEYS  1 where the rollup is
--       2 stream of reports
--       3 prefix of the streams of minutes, followed by the group
--       4 prefix of the streams of hours, followed by the group
-- ARGV  1 id of the last report that had been rolled up before; '' for none
--       2 id of the last report that is rolled up now; '' for none
--       3 id up to which reports are not needed any more
--       4 ms that the rollup lives
--       5 ms that minutes are kept
--       6 ms that hours are kept
--       7.. changes, each of four: 'set', field, value, ''; 'del', field, '', ''; 'minutes' or 'hours', group, ms, value
-- Returns 1, or 0 when another process has saved meanwhile: then nothing is changed.
local state, prefixes = KEYS[1], {minutes = KEYS[3], hours = KEYS[4]}
local kept = {minutes = ARGV[5], hours = ARGV[6]}
if (redis.call('HGET', state, 'cursor') or '') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then redis.call('HSET', state, 'cursor', ARGV[2]) end
for n = 7, #ARGV, 4 do -- bound: the changes of this call
  local what, name, third, value = ARGV[n], ARGV[n + 1], ARGV[n + 2], ARGV[n + 3]
  if what == 'set' then
    redis.call('HSET', state, name, third)
  elseif what == 'del' then
    redis.call('HDEL', state, name)
  else
    local stream = prefixes[what] .. name
    local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
    local ms = last and tonumber(string.match(last[1], '^%d+')) or -1
    -- A chunk that was packed before has a late part: it follows under the next id, and readers add up what is of one time.
    local id = tonumber(third) > ms and third .. '-0' or string.format('%.0f', ms) .. '-' .. (tonumber(string.match(last[1], '%d+$')) + 1)
    redis.call('XADD', stream, 'MINID', '~', string.format('%.0f', tonumber(third) - kept[what]), id, 'at', third, 'points', value)
    redis.call('PEXPIRE', stream, kept[what])
  end
end
redis.call('PEXPIRE', state, ARGV[4])
redis.call('XTRIM', KEYS[2], 'MINID', '~', ARGV[3])
return 1
