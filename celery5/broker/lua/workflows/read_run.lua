-- Read fields of a run, wherever they are: in its own hash, among the idle runs, or in what its plan says of all its runs.
-- KEYS  1 the run
--       2 idle runs
--       3 prefix of definitions
-- ARGV  1 the id of the run
--       2.. names of fields
-- Returns their values, in this order; nothing for those that it does not have.
local found, fields = redis.call('HMGET', KEYS[1], 'def', 'args', unpack(ARGV, 2)), {}
if found[1] then
  fields.def, fields.args = found[1], found[2]
  for n = 2, #ARGV do fields[ARGV[n]] = found[n + 1] end -- bound: the names, 500 at most
else
  local packed = redis.call('HGET', KEYS[2], ARGV[1])
  fields = packed and unpack_run(packed) or {}
end
local values, head = {}, nil
for n = 2, #ARGV do -- bound: as above
  local name, value = ARGV[n], fields[ARGV[n]]
  if not value and fields.def and (name == 'name' or name == 'all' or name == 'end') then
    head = head or redis.call('HGET', KEYS[3] .. fields.def, 'head') or ''
    value = head ~= '' and tostring(cmsgpack.unpack(head)[name])
  end
  if not value and fields.args then
    local argument = string.match(name, '^arg:(%d+)$')
    value = argument and redis.call('HGET', KEYS[1] .. ':args', argument)
  end
  values[n - 1] = value or false
end
return values
