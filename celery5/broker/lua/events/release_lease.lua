-- Give up what one process at a time may have.
-- KEYS  1 who has it
-- ARGV  1 who gives it up
-- Returns 1, or 0 when it was not that one's. Safe to repeat.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
