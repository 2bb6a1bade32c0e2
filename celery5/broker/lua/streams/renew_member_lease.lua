-- Renew the lease of a member of a group, and do nothing else: its worker is busy and cannot renew its membership itself.
-- KEYS  1 members of the group
--       2 the incarnation of each
-- ARGV  1 member
--       2 its incarnation
--       3 lease in ms
-- Returns 1 when it was renewed, 0 when it is a member no more or another incarnation has its name.
local members, incarnations = KEYS[1], KEYS[2]
if redis.call('HGET', incarnations, ARGV[1]) ~= ARGV[2] then return 0 end
if not redis.call('ZSCORE', members, ARGV[1]) then return 0 end
redis.call('ZADD', members, now_ms() + ARGV[3], ARGV[1])
return 1
