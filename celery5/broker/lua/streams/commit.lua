-- Commit what was done in partitions that this member owns: the cursor together with its outputs, state and dead records.
-- KEYS  1 prefix of the partitions of the group
--       2 keyed state of the group
--       3 prefix of its outboxes
--       4 its dead records
--       5 prefix of its parked records
-- ARGV  1 incarnation of the owner
--       2.. for each partition: its number, epoch, the cursor so far, the new cursor, and what goes with it, packed ('' for
--           nothing): outputs, state as key, value, ... ('' removes), dead records as field, value, ..., `ahead`, the ids beyond
--           the cursor that are done
-- Returns for each partition 1 when it is committed, now or by an earlier call with the same arguments, and 0 when this
-- incarnation does not own it in that epoch any more, or the cursor is another: then nothing of it is changed.
local partitions, state, outboxes, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local incarnation = ARGV[1]
local verdicts = {}
for at = 2, #ARGV, 5 do -- bound: the partitions of one call
  local p, epoch, from, to, packed = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local key = partitions .. p
  local found = redis.call('HMGET', key, 'owner', 'epoch', 'cursor', 'ahead')
  local is_owner = found[1] == incarnation and found[2] == epoch
  local extras = packed ~= '' and cmsgpack.unpack(packed)
  local ahead = extras and extras.ahead or ''
  local verdict = 0
  if is_owner and found[3] == to and from ~= to then
    verdict = 1
  elseif is_owner and found[3] == from then
    verdict = 1
    if extras then
      if from ~= to or (found[4] or '') ~= ahead then
        for _, output in ipairs(extras.outputs or {}) do redis.call('XADD', outboxes .. p, '*', 'o', output) end -- bound: the outputs of one commit
        local changes = extras.state or {}
        for n = 1, #changes, 2 do -- bound: the changes of one commit
          if changes[n + 1] == '' then redis.call('HDEL', state, changes[n]) else redis.call('HSET', state, changes[n], changes[n + 1]) end
        end
        for _, words in ipairs(extras.dead or {}) do redis.call('XADD', dead, '*', unpack(words)) end -- bound: the dead records of one commit
      end
      redis.call('HSET', key, 'cursor', to, 'deaths', 0, 'ahead', ahead)
    elseif found[4] and found[4] ~= '' then
      redis.call('HSET', key, 'cursor', to, 'deaths', 0, 'ahead', '')
    else
      redis.call('HSET', key, 'cursor', to, 'deaths', 0)
    end
  end
  verdicts[#verdicts + 1] = verdict
end
return verdicts
