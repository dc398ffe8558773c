-- The service's list of runs: what waits, what an agent has taken, what has ended. Every function is one atomic step, and
-- doing one twice is the same as once, since a client asks again after a lost connection.
--
--   submit ─▶ waiting ─take▶ active ─end▶ ended ─delete▶ doomed ─remove▶ gone
--              ▲ │             ▲ │ its runner died: retake, under a new token
--              │ └──cancel──▶  └─┘
--              └─────────reopen─────────── ended
--
-- Keys, all behind one hash tag, `asyncdock:{@runs}:`. How a run itself fares is in its own keys (pipeline/index/lua).
--   order         runs in the order in which they came, scored by their number; `number` is the last one
--   waiting       those that wait, scored the same
--   active        those that an agent has taken, scored by when their lease ends, in ms
--   run:ID        name, owner, recipe (JSON), key, phase, state and reason (once ended), created, started, ended (ms),
--                 agent, attempts, former (ms that it ran before it was reopened), deaths (of its latest runners, ms), folder, token (of the lease), process (that holds it),
--                 labels (JSON)
--   key:OWNER:KEY run and fingerprint of a submission, for a day
--   ended         how many have ended, by state
--   whole         those that have ended and whose events are in the index still, scored by when they ended, in ms
--   doomed        deleted runs whose folder is there still: run → folder
--   clock         the time of leases, see pipeline/index/lua/clock.lua; each agent calls once a second
--   wake:runs     a stream of one entry, read with BLOCK: something in the list has changed

local KEY_SECONDS = 86400
local SCAN = 250  -- runs looked at in one call, during which the server does nothing else

local function wake(all) call('XADD', all .. 'wake:runs', 'MAXLEN', 1, '*', 'x', 1) end
local function field(all, id, name) return call('HGET', all .. 'run:' .. id, name) end

-- All that is kept of a run; `position` in the queue while it waits, `left` of its lease in ms while it is active.
local function describe(all, id)
  local found = call('HGETALL', all .. 'run:' .. id)
  if #found == 0 then return false end
  local out = { id = id }
  for i = 1, #found, 2 do out[found[i]] = found[i + 1] end
  local rank, due = call('ZRANK', all .. 'waiting', id), call('ZSCORE', all .. 'active', id)
  if rank then out.position = rank + 1 end
  if due then out.left = due - now(all) end
  return out
end

-- Whether `token` is the lease of an active run.
local function holds(all, id, token)
  return field(all, id, 'phase') == 'active' and field(all, id, 'token') == token
end

local function finish(all, id, state, reason)
  call('ZREM', all .. 'waiting', id)
  call('ZREM', all .. 'active', id)
  call('HSET', all .. 'run:' .. id, 'phase', 'ended', 'state', state, 'reason', reason, 'ended', wall())
  call('HINCRBY', all .. 'ended', state, 1)
  if field(all, id, 'folder') ~= '' then call('ZADD', all .. 'whole', now(all), id) end
  wake(all)
end

-- body(all, arguments, whether this call may be a repeated one) → the reply
local function define(name, body)
  redis.register_function('asyncdock_runs_' .. name, function(keys, args)
    local ok, result = pcall(body, keys[1], cmsgpack.unpack(args[1]), args[3] == '1')
    if not ok then return redis.error_reply('INTERNAL runs_' .. name .. ': ' .. tostring(type(result) == 'table' and result.err or result)) end
    return cmsgpack.pack(result)
  end)
end

-- {run, name, owner, recipe, key, fingerprint, folder} → {run, made}; {reused} when the key came with another fingerprint; {taken} when
-- another run has this id.
define('submit', function(all, a, may_be_repeated)
  if call('EXISTS', all .. 'run:' .. a.run) == 1 then
    return may_be_repeated and { run = a.run, made = true } or { taken = true }
  end
  local key = a.key ~= '' and all .. 'key:' .. a.owner .. ':' .. a.key
  local known = key and call('HMGET', key, 'run', 'fingerprint')
  if known and known[1] then
    if known[2] ~= a.fingerprint then return { reused = known[1] } end
    return { run = known[1], made = false }
  end
  local number = call('INCR', all .. 'number')
  call('HSET', all .. 'run:' .. a.run, 'name', a.name, 'owner', a.owner, 'recipe', a.recipe, 'key', key or '', 'phase', 'waiting',
    'created', wall(), 'attempts', 0, 'agent', '', 'folder', a.folder, 'process', '')
  call('ZADD', all .. 'order', number, a.run)
  call('ZADD', all .. 'waiting', number, a.run)
  if key then
    call('HSET', key, 'run', a.run, 'fingerprint', a.fingerprint)
    call('EXPIRE', key, KEY_SECONDS)
  end
  wake(all)
  return { run = a.run, made = true }
end)

define('get', function(all, a) return describe(all, a.run) end)

-- The SCAN newest runs behind number `after`, each as {run, number}; → and the number of the oldest one behind it.
local function newest(all, after)
  local out, below = {}, after == '' and '+inf' or '(' .. after
  local found = call('ZREVRANGEBYSCORE', all .. 'order', below, '-inf', 'WITHSCORES', 'LIMIT', 0, SCAN)
  for i = 1, #found, 2 do out[#out + 1] = { found[i], tonumber(found[i + 1]) } end
  return out, tonumber(call('ZRANGE', all .. 'order', 0, 0, 'WITHSCORES')[2])
end

-- The same of the runs that wait or are active, which are few.
local function newest_of(all, phase, after)
  local out = {}
  for _, id in ipairs(call('ZRANGE', all .. phase, 0, -1)) do
    local number = tonumber(call('ZSCORE', all .. 'order', id))
    if number and (after == '' or number < tonumber(after)) then out[#out + 1] = { id, number } end
  end
  table.sort(out, function(one, other) return one[2] > other[2] end)
  return out, out[#out] and out[#out][2]
end

-- {phase, state, name, owner, after, limit} → {runs, next}: newest first, those behind number `after`; `state` is asked of
-- those that have ended. There may be more when `next` is not empty, even if fewer than `limit` were found.
define('list', function(all, a)
  local out, last, found, oldest = {}, nil, nil, nil
  if a.phase == 'waiting' or a.phase == 'active' then
    found, oldest = newest_of(all, a.phase, a.after)
  else
    found, oldest = newest(all, a.after)
  end
  for i = 1, math.min(#found, SCAN) do
    local id = found[i][1]
    local known = call('HMGET', all .. 'run:' .. id, 'phase', 'state', 'name', 'owner')
    local phase = known[1]
    last = found[i][2]
    if (a.phase == '' or phase == 'active' or phase == a.phase) and (a.state == '' or phase ~= 'ended' or known[2] == a.state)
      and (a.name == '' or string.find(string.lower(known[3]), string.lower(a.name), 1, true))
      and (a.owner == '' or known[4] == a.owner) then
      out[#out + 1] = describe(all, id)
      if #out == a.limit then break end
    end
  end
  return { runs = out, next = last and last > oldest and string.format('%d', last) or '' }
end)

-- → run → folder, of the waiting runs that go on from the checkpoints there, or begin with weights there
define('reopened', function(all, a)
  local out = {}
  for _, id in ipairs(call('ZRANGE', all .. 'waiting', 0, -1)) do
    local folder = field(all, id, 'folder')
    if folder ~= '' then out[id] = folder end
  end
  return out
end)

-- {agent, folders, token, lease, here} → the run that has waited longest, now this agent's; false when none waits. A run with a
-- folder waits for the agent that has it, among its runs `here`.
define('take', function(all, a, again)
  if again then
    for _, id in ipairs(call('ZRANGE', all .. 'active', 0, -1)) do
      if field(all, id, 'token') == a.token then return describe(all, id) end
    end
  end
  local id, here = nil, {}
  for _, run in ipairs(a.here or {}) do here[run] = true end
  for _, waiting in ipairs(call('ZRANGE', all .. 'waiting', 0, -1)) do
    if here[waiting] or field(all, waiting, 'folder') == '' then id = waiting break end
  end
  if not id then return false end
  call('ZREM', all .. 'waiting', id)
  call('ZADD', all .. 'active', now(all) + a.lease, id)
  call('HSET', all .. 'run:' .. id, 'phase', 'active', 'agent', a.agent, 'token', a.token, 'folder', a.folders .. '/' .. id,
    'attempts', 1, 'started', wall())
  wake(all)
  return describe(all, id)
end)

-- {run, old, token, agent, lease, most, window} → 'taken' when the run is now this agent's under `token`, which follows on `old`;
-- 'lost' when another one has it; 'used up' when `most` runners have died within `window` ms.
define('retake', function(all, a)
  if holds(all, a.run, a.token) then return 'taken' end
  if not holds(all, a.run, a.old) then return 'lost' end
  local t = now(all)
  local deaths = { string.format('%d', t) }
  for death in string.gmatch(field(all, a.run, 'deaths') or '', '%d+') do
    if t - death < a.window then deaths[#deaths + 1] = string.format('%d', death) end
  end
  if #deaths > a.most then return 'used up' end
  call('HINCRBY', all .. 'run:' .. a.run, 'attempts', 1)
  call('HSET', all .. 'run:' .. a.run, 'deaths', table.concat(deaths, ' '))
  call('HSET', all .. 'run:' .. a.run, 'token', a.token, 'agent', a.agent, 'process', '')
  call('ZADD', all .. 'active', now(all) + a.lease, a.run)
  wake(all)
  return 'taken'
end)

-- {run, token, lease, process} → whether `token` still holds the run; if so, for another lease.
define('renew', function(all, a)
  if not holds(all, a.run, a.token) then return false end
  call('ZADD', all .. 'active', now(all) + a.lease, a.run)
  call('HSET', all .. 'run:' .. a.run, 'process', a.process)
  return true
end)

-- {run, token, state, reason} → whether the run has ended by this call.
define('end', function(all, a)
  if field(all, a.run, 'phase') == 'ended' and field(all, a.run, 'token') == a.token then return true end
  if not holds(all, a.run, a.token) then return false end
  finish(all, a.run, a.state, a.reason)
  return true
end)

-- {run, ended, recipe} → whether the run, which ended at `ended`, waits again, to go on with `recipe`.
define('reopen', function(all, a, again)
  local phase, ended = field(all, a.run, 'phase'), field(all, a.run, 'ended')
  if phase ~= 'ended' then return again and phase ~= false and field(all, a.run, 'recipe') == a.recipe end
  if tonumber(ended) ~= a.ended then return false end
  call('HINCRBY', all .. 'ended', field(all, a.run, 'state'), -1)
  local started = field(all, a.run, 'started')
  if started then call('HINCRBY', all .. 'run:' .. a.run, 'former', ended - started) end
  call('HDEL', all .. 'run:' .. a.run, 'state', 'reason', 'ended', 'started', 'token', 'deaths')
  call('HSET', all .. 'run:' .. a.run, 'phase', 'waiting', 'recipe', a.recipe, 'attempts', 0, 'agent', '', 'process', '')
  call('ZADD', all .. 'waiting', call('INCR', all .. 'number'), a.run)
  call('ZREM', all .. 'whole', a.run)
  wake(all)
  return true
end)

-- {run, reason} → whether the run waited, and never will begin.
define('cancel', function(all, a, again)
  if field(all, a.run, 'phase') ~= 'waiting' then return again and field(all, a.run, 'started') == false end
  finish(all, a.run, 'stopped', a.reason)
  return true
end)

-- → all active runs
define('active', function(all, a)
  local out = {}
  for i, id in ipairs(call('ZRANGE', all .. 'active', 0, -1)) do out[i] = describe(all, id) end
  return out
end)

-- → how many wait, and how many have ended in which state
define('counts', function(all, a)
  local out, ended = { created = call('ZCARD', all .. 'waiting') }, call('HGETALL', all .. 'ended')
  for i = 1, #ended, 2 do out[ended[i]] = tonumber(ended[i + 1]) end
  return out
end)

-- {run} → 'done', or why not: 'unknown', 'active', 'waiting'. What is left of it is its folder.
define('delete', function(all, a, again)
  local known = describe(all, a.run)
  if not known then return (again or call('HEXISTS', all .. 'doomed', a.run) == 1) and 'done' or 'unknown' end
  if known.phase ~= 'ended' then return known.phase end
  if known.folder ~= '' then call('HSET', all .. 'doomed', a.run, known.folder) end
  if known.key ~= '' then call('DEL', known.key) end
  call('ZREM', all .. 'order', a.run)
  call('ZREM', all .. 'whole', a.run)
  call('HINCRBY', all .. 'ended', known.state, -1)
  call('DEL', all .. 'run:' .. a.run)
  wake(all)
  return 'done'
end)

-- {ago, most} → up to `most` runs that ended `ago` ms ago or earlier, and whose events are in the index still
define('whole', function(all, a)
  local found = call('ZRANGEBYSCORE', all .. 'whole', '-inf', now(all) - a.ago, 'LIMIT', 0, a.most)
  local out = {}
  for i, id in ipairs(found) do out[i] = describe(all, id) end
  return out
end)

-- {run, given_up}: its events are not in the index any more; or they are, and are looked at later again.
define('looked_at', function(all, a)
  if a.given_up then return call('ZREM', all .. 'whole', a.run) end
  return call('ZADD', all .. 'whole', 'XX', now(all), a.run)
end)

-- {run, labels}: notes and tags that people gave to it. → whether there is such a run
define('label', function(all, a)
  if not field(all, a.run, 'phase') then return false end
  call('HSET', all .. 'run:' .. a.run, 'labels', a.labels)
  wake(all)
  return true
end)

-- → run → folder
define('doomed', function(all, a)
  local out, found = {}, call('HGETALL', all .. 'doomed')
  for i = 1, #found, 2 do out[found[i]] = found[i + 1] end
  return out
end)

-- {run}: its folder is gone.
define('remove', function(all, a) return call('HDEL', all .. 'doomed', a.run) end)

-- Time passes.
define('tick', function(all) return now(all) end)

-- → whatever waits on the list looks again
define('touch', function(all, a)
  wake(all)
  return true
end)
