-- Return of which tasks live workers have other code.
-- KEYS  1 where the queue's jobs are; what is known of code and of foreign jobs is named after it (lib/foreign.lua)
-- ARGV  1.. for each job: its task, and the signatures of it that do not count, with commas between
-- Returns the time in ms since 1970, and for each job 1 when a live worker knows its task with another signature, else 0.
local VERSIONS = 64
local now = now_ms()
local tasks, found = {}, {now}
for n = 1, #ARGV, 2 do -- bound: the jobs of this call, 50 at most
  tasks[#tasks + 1] = ARGV[n]
  found[#found + 1] = 0
end
local live = redis.call('ZRANGEBYSCORE', KEYS[1] .. ':code', '(' .. now, '+inf', 'LIMIT', 0, VERSIONS)
for _, version in ipairs(live) do -- bound: VERSIONS
  for n, signature in ipairs(redis.call('HMGET', KEYS[1] .. ':code:' .. version, unpack(tasks))) do -- bound: the jobs of this call
    if signature and not string.find(',' .. ARGV[2 * n] .. ',', ',' .. signature .. ',', 1, true) then found[n + 1] = 1 end
  end
end
return found
