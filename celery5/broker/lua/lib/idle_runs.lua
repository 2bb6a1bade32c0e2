-- Idle runs: a part of the scripts that read runs: they begin with it. A run is idle when it is live and no job of it is on a queue or
-- runs: it sleeps, or waits for a signal or a dead letter. All idle runs of a queue share one hash. Each is one value there, which takes
-- less than half of the memory of a hash of its own. Only this file knows how it is packed: as a list of names and values in turn.
local MOST_FIELDS = 100 -- of a run that is packed
local MOST_BYTES = 2048 -- of their values
-- Return the words for which a number stands: names of fields of a run; those of its nodes, which `:` and the number of a node follow;
-- and states of nodes. New ones are put at the end: runs that are packed stay valid. An argument of a run is the number -100 or less. A
-- function, so that only calls that need them make them.
local function list_words()
  return {'def', 'active', 'tail', 'until', 'parent', 'done', 'bad', 'skipped', 'error', 'wakes', 'created', 'held', 'life', 'all',
    'watched', 'undone', 'failed_at', 'errors', 'root', 'depth'}, {'node', 'left', 'value', 'watched', 'bad', 'run'}, {'done', 'waiting', 'skipped', 'counted', 'held', 'cut', 'again'}
end
-- Return the fields of a run as one value; nothing when they are too many, or too long. What is not there is `false` or missing. Its state
-- is left out, and so are counters of 0.
local function pack_run(fields)
  local names, node_names, states = list_words()
  local kinds, packed = #node_names, {}
  for _, words in ipairs({names, node_names, states}) do -- bound: three
    for at, word in ipairs(words) do words[word] = at end -- bound: the words above
  end
  local size = 0
  for name, value in pairs(fields) do -- bound: MOST_FIELDS
    if value and name ~= 'state' and not (names[name] and (value == 0 or value == '0')) then
      local kind, n = string.match(name, '^(%a+):(%d+)$')
      local text = type(value) == 'number' and string.format('%.0f', value) or value
      size = size + #text
      if size > MOST_BYTES or #packed >= 2 * MOST_FIELDS then return nil end
      local is_number = text == '0' or #text < 16 and string.find(text, '^[1-9]%d*$')
      packed[#packed + 1] = names[name] and -names[name] or node_names[kind] and n * kinds + node_names[kind] - 1 or kind == 'arg' and -100 - n or name
      packed[#packed + 1] = is_number and tonumber(text) or states[text] and -states[text] or text
    end
  end
  return cmsgpack.pack(packed)
end
-- Return the fields of an idle run.
local function unpack_run(value)
  local names, node_names, states = list_words()
  local kinds, packed, fields = #node_names, cmsgpack.unpack(value), {state = 'live'}
  for at = 1, #packed, 2 do -- bound: MOST_FIELDS
    local name, content = packed[at], packed[at + 1]
    if type(name) == 'number' then
      name = name <= -100 and 'arg:' .. string.format('%.0f', -100 - name) or name < 0 and names[-name] or node_names[name % kinds + 1] .. ':' .. string.format('%.0f', math.floor(name / kinds))
    end
    if type(content) == 'number' then content = content < 0 and states[-content] or string.format('%.0f', content) end
    fields[name] = content
  end
  return fields
end
