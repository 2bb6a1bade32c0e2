-- Lease: a part of the scripts that a worker may run only while it has its lease: they begin with it.
-- Return whether a worker has its lease. A lease below 0 belongs to a worker that is being recovered.
local function has_lease(leases, worker)
  local lease = redis.call('ZSCORE', leases, worker)
  return lease and tonumber(lease) >= 0
end
