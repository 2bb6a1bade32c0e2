-- Append an entry to the audit trail of an application, and trim the trail.
-- KEYS  1 audit trail
-- ARGV  1 how many entries stay, about
--       2 ttl in ms
--       3.. fields of the entry and their values, in turns
-- Returns the id of the entry, which has the time of this server.
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return id
