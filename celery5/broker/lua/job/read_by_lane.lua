-- Take jobs of one queue for a worker: of each lane its share, then of the first ones what is left.
-- KEYS  1.. streams of the lanes, the first one first
-- ARGV  1 consumer group
--       2 the worker
--       3 how many jobs at most
--       4.. share of each lane, in jobs
-- Returns what it took, lane by lane, as XREADGROUP does.
local group, me, left = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found, taken, full = {}, {}, {}
local function take(n, most)
  most = math.min(most, left)
  if most < 1 then return end
  local read = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', most, 'STREAMS', KEYS[n], '>')
  local entries = read and read[1][2] or {}
  full[n] = #entries == most -- else there is nothing more
  left = left - #entries
  taken[n] = taken[n] or {}
  for _, entry in ipairs(entries) do table.insert(taken[n], entry) end -- bound: ARGV 3
end
for n = 1, #KEYS do -- bound: the lanes
  full[n] = true
  take(n, tonumber(ARGV[n + 3]))
end
for n = 1, #KEYS do -- bound: the lanes
  if full[n] then take(n, left) end
end
for n = 1, #KEYS do -- bound: the lanes
  if taken[n] and #taken[n] > 0 then found[#found + 1] = {KEYS[n], taken[n]} end
end
return found
