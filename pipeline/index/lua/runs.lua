-- The run as a whole: its beginning and end, its state, its figures.

-- {config, counters, remake, rates or false} → true when the run is new; otherwise nothing changes. A resumed run gives the
-- counters and pass rates of its checkpoint, and the groups below `admitted` that it has not trained.
define('init', function(run, a)
  if call('SETNX', run .. 'config', cmsgpack.pack(a.config)) == 0 then return false end
  configs[run] = nil
  for field, number in pairs(a.counters) do call('HSET', run .. 'n', field, number) end
  for _, group in ipairs(a.remake) do
    call('SADD', run .. 'remake', group)
    add(run .. 'open', group, group)
  end
  if a.rates then load_rates(run, a.rates) end
  return true
end)

define('config', function(run) return config(run) end, true)

-- {versions} → {counts = {admitted, gate, filtered groups, published, trained, planned, dropped before}, remake = lost groups to be made again, gates, wait}.
-- The i-th version may make tokens of groups below the i-th of `gates`. A run that has no config yet has gate 0, and one whose
-- next groups wait the gate `admitted`. `planned`: groups of the steps up to the newest that the bound allows, without the
-- dropped ones; `dropped before`: those of the steps trained so far.
define('status', function(run, a)
  local begun, gates = call('EXISTS', run .. 'config') == 1, {}
  local found = call('HMGET', run .. 'n', 'admitted', 'filtered_groups', 'published', 'trained', 'dropped_before')
  for i, version in ipairs(a.versions) do gates[i] = gate(run, config(run), version) end
  local limit = begun and gate(run, config(run), int(found[3])) or 0
  local cfg = begun and config(run)
  local planned = cfg and (int(found[4]) + slack_of(run, cfg)) * cfg.groups_per_step or 0
  if begun and replacements_wait(run, config(run)) then limit = min(limit, int(found[1])) end
  return {
    counts = { int(found[1]), limit, int(found[2]), int(found[3]), int(found[4]), planned, int(found[5] or 0) },
    remake = call('SMEMBERS', run .. 'remake'), gates = gates, wait = woken(run, 'version'),
  }
end, true)

-- → {state, reason, wait}
define('state', function(run, a)
  local found = call('HMGET', run .. 'state', 'state', 'reason')
  return { found[1] or '', found[2] or '', woken(run, 'state') }
end, true)

-- {from = {state…}, to, reason, event} → {state, changed}. The state changes only when it is one of `from`; then `event` is
-- written.
define('transition', function(run, a)
  local state = call('HGET', run .. 'state', 'state') or ''
  for _, allowed in ipairs(a.from) do
    if state == allowed then
      call('HSET', run .. 'state', 'state', a.to, 'reason', a.reason)
      tell(run, 'state', a.event)
      wake(run, 'state')
      return { state = a.to, changed = true }
    end
  end
  return { state = state, changed = false }
end)

-- {slack}: how many steps admission runs ahead from now on, at most as many as the run's config says.
define('set_slack', function(run, a)
  local cfg = config(run)
  if a.slack < 1 or a.slack > cfg.slack then fail('BAD', 'slack ' .. a.slack .. ' is not within 1 and ' .. cfg.slack) end
  call('HSET', run .. 'n', 'slack', a.slack)
  wake(run, 'version')
  for _, stage in ipairs(cfg.stages) do wake_stage(run, stage.name) end
  return true
end)

-- → {admitted groups; those of them that were trained, are held by the trainer, or could be picked one step after the other},
-- both without the filtered ones. Which groups the trainer holds is not looked up: as many of the oldest that are not ready.
define('progress', function(run)
  local cfg, admitted = config(run), value(run, 'admitted') - value(run, 'filtered_groups')
  local done, held, anchor = admitted - size_of(members(run .. 'open')), 0, nil
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'batch' then
      if call('EXISTS', run .. 'due:' .. stage.name) == 1 then held = cfg.groups_per_step end
      done = done + held
      for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
        local first, last = ends(member)
        local ready = split(run .. 'ready:' .. stage.name .. ':0', first, last)
        local at = 1
        for group = first, last do
          if anchor and group >= anchor + cfg.window then return { admitted, done } end
          while ready[at] and ready[at + 1] < group do at = at + 2 end
          if ready[at] and ready[at] <= group then
            done = done + 1
          elseif held > 0 then
            held = held - 1
          else
            anchor = anchor or group
          end
        end
      end
    end
  end
  return { admitted, done }
end, true)

-- {stage} → how many rows or groups can be claimed
define('queue_depth', function(run, a) return value(run, 'ready:' .. a.stage) end, true)

-- {stage} → {ready, leased, parked}. Expired leases of the stage end first.
define('queue', function(run, a)
  local cfg, leased = config(run), 0
  local stage = stage_of(cfg, a.stage)
  reap(run, cfg, stage, now(run))
  for _, token in ipairs(call('ZRANGE', run .. 'due:' .. stage.name, 0, -1)) do leased = leased + lease_of(run, token)[4] end
  return { ready = value(run, 'ready:' .. stage.name), leased = leased, parked = value(run, 'parked:' .. stage.name) }
end)

-- Generated samples, tokens and turns that are neither trained nor removed: counted row by row over the open groups, not derived
-- from the other counters; and those that an ended run has left.
local function in_flight(run)
  local samples, tokens, turns = generated_in(run, rows_in(run, members(run .. 'open')))
  return value(run, 'left') + samples, value(run, 'left_tokens') + tokens, value(run, 'left_turns') + turns
end

-- → groups and tokens that were dropped, each {reason → number}
local function dropped(run)
  local groups, tokens, found = {}, {}, call('HGETALL', run .. 'n')
  for i = 1, #found, 2 do
    if sub(found[i], 1, 8) == 'dropped:' then
      local reason = sub(found[i], 9)
      groups[reason], tokens[reason] = int(found[i + 1]), value(run, 'dropped_tokens:' .. reason)
    end
  end
  return groups, tokens
end

local function ledger(run)
  local samples, tokens, turns = in_flight(run)
  local out = {
    in_flight = samples, in_flight_tokens = tokens, in_flight_turns = turns,
    redelivered = value(run, 'redelivered'), skipped_steps = value(run, 'skipped_steps'),
    spared_groups = value(run, 'spared_groups'),
    replayed = value(run, 'replayed_rows'), replayed_tokens = value(run, 'replayed_rows_tokens'),
  }
  for _, unit in ipairs({ '', '_tokens', '_turns' }) do
    out['generated' .. unit] = value(run, 'generated' .. unit)
    for _, way in ipairs({ 'trained', 'filtered', 'remade' }) do out[way .. unit] = value(run, way .. '_rows' .. unit) end
  end
  return out
end

define('ledger', function(run, a) return ledger(run) end, true)

define('ledger_event', function(run, a)
  local out = ledger(run)
  out.dropped, out.dropped_tokens = dropped(run)
  out.version = value(run, 'trained')
  return out
end, true)

-- The run has ended and its samples are about to be removed: from now on the counters alone hold its figures.
define('retire', function(run, a)
  local samples, tokens, turns = in_flight(run)
  call('HSET', run .. 'n', 'left', samples, 'left_tokens', tokens, 'left_turns', turns, 'live', 0)
  call('DEL', run .. 'open')
  for _, stage in ipairs(config(run).stages) do
    call('HSET', run .. 'n', 'ready:' .. stage.name, 0, 'parked:' .. stage.name, 0)
  end
  return true
end)

-- → {counters, remake, rates}: what a run that resumes at the trainer's version starts from. Groups admitted and not trained are made
-- again; their responses leave the ledger, because they are generated again.
define('resume_point', function(run, a)
  local trained, remake = value(run, 'trained'), {}
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    for group = first, last do remake[#remake + 1] = group end
  end
  local counters = { published = trained, trained = trained, admitted = value(run, 'admitted') }
  for _, unit in ipairs({ '', '_tokens', '_turns' }) do
    local left = 0
    for _, name in ipairs({ 'trained_rows', 'filtered_rows', 'remade_rows' }) do
      counters[name .. unit] = value(run, name .. unit)
      left = left + counters[name .. unit]
    end
    counters['generated' .. unit] = left
  end
  for _, name in ipairs({ 'filtered_groups', 'dropped_before', 'spared_groups', 'skipped_steps', 'replayed_rows', 'replayed_rows_tokens' }) do
    counters[name] = value(run, name)
  end
  for _, field in ipairs(call('HKEYS', run .. 'n')) do
    if sub(field, 1, 4) == 'drop' then counters[field] = value(run, field) end
  end
  return { counters = counters, remake = remake, rates = kept_rates(run) }
end, true)

-- → {stages = {stage → ready, leased, begun = rows with progress, parked = those of them without a lease}, used and capacity by
-- warehouse, …}
define('stats', function(run, a)
  local cfg, t = config(run), now(run)
  local open = size_of(members(run .. 'open'))
  local out = {
    admitted = value(run, 'admitted'), published = value(run, 'published'), trained = value(run, 'trained'),
    gate = gate(run, cfg, value(run, 'published')), open = open, rows = value(run, 'live'),
    blocks = call('HLEN', run .. 'blocks'), stages = {}, warehouses = {}, leases = {},
  }
  for _, stage in ipairs(cfg.stages) do
    reap(run, cfg, stage, t)
    local leased = 0
    local due = call('ZRANGE', run .. 'due:' .. stage.name, 0, -1, 'WITHSCORES')
    for i = 1, #due, 2 do
      local lease = lease_of(run, due[i])
      leased = leased + lease[4]
      out.leases[#out.leases + 1] = {
        lease = sub(due[i], 1, 8), stage = stage.name, worker = lease[2], rows = lease[4],
        since = lease[6] / 1000, due = due[i + 1] / 1000,
      }
    end
    local queue = { ready = value(run, 'ready:' .. stage.name), leased = leased, takes = stage.takes }
    out.stages[stage.name] = queue
    if stage.takes == 'groups' and stage.producer > 0 then
      local rows = stage.origin == stage.name and members(run .. 'begun:' .. stage.name) or {}
      queue.begun, queue.parked = size_of(rows), value(run, 'parked:' .. stage.name)
    end
  end
  local houses = call('HGETALL', run .. 'warehouses')
  for i = 1, #houses, 2 do
    local known = cmsgpack.unpack(houses[i + 1])
    out.warehouses[known.name] = {
      capacity = known.bytes, used = value(run, 'used:' .. houses[i]), node = known.node, leaving = known.leaving,
    }
  end
  return out
end)

-- {worker, stages, version or false, ready}: the worker is alive now, with these stages and this policy version.
define('beat', function(run, a)
  call('HSET', run .. 'alive', a.worker, cmsgpack.pack({ now(run), a.stages, a.version or false, a.ready }))
  return true
end, true)

-- → {worker → {ms of the server's clock when it was last alive, stages, version or false, ready}}
define('alive', function(run)
  local out, found = {}, call('HGETALL', run .. 'alive')
  for i = 1, #found, 2 do out[found[i]] = cmsgpack.unpack(found[i + 1]) end
  return out
end, true)

-- → {now and the ages of the run's state and version in ms, settled, trainer, group, stage, rows,
-- holders = {{worker, ms when it claimed}…}, parked}: what training waits for. `trainer` is the stage that takes batches (false: none), `group` the oldest open one that cannot be claimed from it
-- (false: none), `stage` the first one that has not processed `rows` of its rows, though it could (false: the group waits for
-- admission). `settled`: how many rows have left a lease processed, of all stages.
define('waiting', function(run)
  local cfg, out = config(run), { now = now(run), settled = value(run, 'settled'), trainer = false, group = false, stage = false,
    rows = 0, parked = 0, holders = {}, state_age = age(run, 'state'), version_age = age(run, 'version') }
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'batch' then
      out.trainer = stage.name
      for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
        local missing = select(2, split(run .. 'ready:' .. stage.name .. ':0', ends(member)))
        if missing[1] then
          out.group = missing[1]
          break
        end
      end
    end
  end
  local first, n = 0, 0
  if out.group then first, n = rows_of(run, out.group) end
  for _, stage in ipairs(cfg.stages) do
    for row = first, first + n - 1 do
      local columns, done = unpack_at('<I4I2', read(run, 's', 8, row, row))
      if band(columns, stage.needs) == stage.needs and band(done, stage.bit) == 0 then
        out.stage, out.rows = stage.name, out.rows + 1
      end
    end
    if out.stage then break end
  end
  local leases = out.stage and call('HGETALL', run .. 'leases') or {}
  local holders = {}  -- by stage
  for i = 2, #leases, 2 do
    local lease, holds = cmsgpack.unpack(leases[i]), false
    for j = 1, #lease[3], 2 do holds = holds or lease[3][j] < first + n and lease[3][j + 1] >= first end
    if holds then
      holders[lease[1]] = holders[lease[1]] or {}
      table.insert(holders[lease[1]], { lease[2], lease[6] })
    end
  end
  -- Of stages that take turns, the one that has rows of the group.
  for _, stage in ipairs(out.stage and cfg.stages or {}) do
    if stage.origin == out.stage then
      local parked = size_of((split(run .. 'parked:' .. stage.name, first, first + n - 1)))
      if stage.name == stage.origin or parked > 0 or holders[stage.name] then
        out.turn, out.parked, out.holders = stage.name, parked, holders[stage.name] or {}
      end
    end
  end
  out.stage, out.turn = out.turn or out.stage, nil
  return out
end, true)

-- {group} → its rows as a claim returns them, with `states`; false when it is not in the run.
define('inspect', function(run, a)
  local first, n = rows_of(run, a.group)
  if n == 0 then return false end
  local out = describe(run, config(run), { first, first + n - 1 })
  out.states = read(run, 's', 8, first, first + n - 1)
  return out
end, true)
