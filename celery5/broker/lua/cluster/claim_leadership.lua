-- Elect the Controller of an application that acts: take, keep or give up the lead.
-- KEYS  1 the record of the leader
-- ARGV  1 this Controller's name
--       2 the record that it may replace: its epoch, a space, its beat; '0 0' when there is none; '' for no record
--       3 the epoch that it leads in, 0 when it stands by
--       4 1 to take or keep the lead, 0 to give it up
--       5 ms for which the record is kept
-- Returns the record: its epoch, its beat, the leader's name ('' for none) and since when it leads, in ms. Safe to repeat.
local known = redis.call('HMGET', KEYS[1], 'epoch', 'beat', 'leader', 'since')
-- A field that is no whole number was written by another program, and counts as missing.
local function whole(value)
  local number = tonumber(value)
  if number and number >= 0 and number < 9007199254740992 then return string.format('%.0f', math.floor(number)) end
  return '0'
end
local epoch, beat, leader, since = whole(known[1]), whole(known[2]), known[3] or '', whole(known[4])
local mine = leader == ARGV[1]
local free = leader == '' and epoch ~= '0' -- the last leader has ended in order
if ARGV[4] == '0' then
  if not mine or epoch ~= ARGV[3] then return {epoch, beat, leader, since} end
  leader = ''
elseif not mine then
  if not free and epoch .. ' ' .. beat ~= ARGV[2] then return {epoch, beat, leader, since} end
  local now = now_ms()
  if epoch == '0' and ARGV[3] ~= '0' then
    epoch = ARGV[3] -- Redis has lost its record
  else
    -- From the time, so that it grows also when Redis has lost the last epoch.
    epoch = string.format('%.0f', math.max(epoch + 1, now))
  end
  leader, since = ARGV[1], string.format('%.0f', now)
end
beat = string.format('%.0f', beat + 1)
redis.call('HSET', KEYS[1], 'epoch', epoch, 'beat', beat, 'leader', leader, 'since', since)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {epoch, beat, leader, since}
