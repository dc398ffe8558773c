-- Optimizer steps, dropped groups, published weights, and turns to swap them.

-- Adds the generated rows of these ranges to the ledger as `name`; → their tokens. They no longer count as in flight.
local function tally(run, rows, name)
  local samples, tokens, turns = generated_in(run, rows)
  count(run, name, samples)
  count(run, name .. '_tokens', tokens)
  count(run, name .. '_turns', turns)
  return tokens
end

-- {groups = {group…}}: their step may drop no more, so these will be trained though they teach nothing. Can be repeated.
define('spare_groups', function(run, a)
  for _, group in ipairs(a.groups) do call('SADD', run .. 'spared', group) end
  return true
end)

local function no_longer_spared(run, groups)
  local spared = 0
  if call('EXISTS', run .. 'spared') == 0 then return spared end
  for i = 1, #groups, 2 do
    for group = groups[i], groups[i + 1] do spared = spared + call('SREM', run .. 'spared', group) end
  end
  return spared
end

-- {amounts = {name → number}}: stages have done so much more of what they count. A step reports it.
define('add_amounts', function(run, a)
  for name, amount in pairs(a.amounts) do call('HINCRBYFLOAT', run .. 'amounts', name, amount) end
  return true
end)

-- → {name → number}: the amounts that no step has reported yet
define('amounts', function(run)
  local out, found = {}, call('HGETALL', run .. 'amounts')
  for i = 1, #found, 2 do out[found[i]] = tonumber(found[i + 1]) end
  return out
end, true)

-- Counts the rows of groups {first, last, …} as trained once more, at version `trained`. They must be of earlier steps, and no older
-- than replayed rows may be. Those that a warehouse has lost since they were fetched are left out.
local function count_replayed(run, cfg, groups, trained)
  local rows = rows_in(run, groups)
  for i = 1, #rows, 2 do
    local from, to = rows[i], rows[i + 1]
    local made = read(run, 'g', 8, from, to)
    stretches(read(run, 's', 8, from, to), function(entry, x)
      if select(3, unpack_at('<I4I2I1', entry)) ~= TRAINED then fail('BAD', 'row ' .. from + x .. ' was not trained; it cannot be replayed') end
    end)
    for j = 0, to - from do
      local oldest, bound = unpack_at('<i4', made, 8 * j + 1), cfg.staleness + cfg.replay_versions
      if trained - oldest > bound then
        fail('STALE', 'replayed row ' .. from + j .. ' of version ' .. oldest .. ' at version ' .. trained .. ': the bound is ' .. bound)
      end
    end
    count(run, 'replayed_rows', to - from + 1)
    count(run, 'replayed_rows_tokens', sum_of(made, 8, 5, 0, to - from))
  end
end

-- {stage, token, owner?, version, rows, event?, skipped?, reported = {name → number}, replayed = {first group, last, …}}: an
-- optimizer step was made of these rows at `version`, and of the groups `replayed` of earlier steps; → the next one. Its event
-- has the amounts `reported`.
define('train', function(run, a)
  local cfg = config(run)
  local stage = stage_of(cfg, a.stage)
  local trained = value(run, 'trained')
  if a.version ~= trained then
    fail('BAD', 'step ' .. a.version + 1 .. ' is not next: the trainer is at version ' .. trained)
  end
  local lease, total, ranges = held(run, stage, a.token, a.owner, a.rows)
  local groups = {}
  for r, parts in ipairs(ranges) do
    local from, to = a.rows[2 * r - 1], a.rows[2 * r]
    local made, fixed, k = read(run, 'g', 8, from, to), read(run, 'f', 8, from, to), 0
    for j = 0, to - from do
      local oldest = unpack_at('<i4', made, 8 * j + 1)
      if trained - oldest > cfg.staleness then
        fail('STALE', 'row ' .. from + j .. ' of version ' .. oldest .. ' at version ' .. trained .. ': the bound is ' .. cfg.staleness)
      end
    end
    for _, part in ipairs(parts) do
      if part[5] ~= GENERATED then fail('TWICE', 'row ' .. part[1] .. ' was trained before, or never generated') end
    end
    while k <= to - from do
      local group, place, size = unpack_at('<I4I2I2', fixed, 8 * k + 1)
      if place ~= 0 or size > to - from + 1 - k then fail('BAD', 'group ' .. group .. ' is not whole; train all of its rows') end
      append(groups, group, group)
      k = k + size
    end
  end
  if #a.replayed > 0 then
    count_replayed(run, cfg, a.replayed, trained)
    call('HSET', run .. 'replays', trained, cmsgpack.pack(a.replayed))
  end
  tally(run, a.rows, 'trained_rows')
  for r, parts in ipairs(ranges) do
    local states = {}
    for i, part in ipairs(parts) do
      states[i] = rep(pack('<I4I2I1I1', part[3], bor(part[4], stage.bit), TRAINED, 0), part[2] - part[1] + 1)
    end
    write(run, 's', 8, a.rows[2 * r - 1], table.concat(states))
  end
  for i = 1, #groups, 2 do cut(run .. 'open', groups[i], groups[i + 1]) end
  rate_groups(run, groups)
  call('HSET', run .. 'steps', trained, cmsgpack.pack(groups))
  count(run, 'spared_groups', no_longer_spared(run, groups))
  call('HSET', run .. 'n', 'trained', trained + 1, 'dropped_before', value(run, 'filtered_groups'))
  if a.skipped then
    count(run, 'skipped_steps', 1)
    call('SADD', run .. 'skipped', trained)
  end
  for name, amount in pairs(a.reported or {}) do
    local left = tonumber(call('HINCRBYFLOAT', run .. 'amounts', name, -amount))
    if math.abs(left) < 1e-9 then call('HDEL', run .. 'amounts', name) end  -- a rounding may be left
  end
  tell(run, 'step', a.event)
  settle(run, a.token, lease, total)
  return trained + 1
end)

-- The rows of groups {first, last, …}, which must all be there.
local function rows_of_groups(run, groups)
  local rows = rows_in(run, groups)
  for i = 1, #groups, 2 do
    for group = groups[i], groups[i + 1] do
      if select(2, rows_of(run, group)) == 0 then fail('GONE', 'group ' .. group .. ' of an earlier step was released, or lost with a warehouse') end
    end
  end
  return rows
end

-- {version} → the rows that a step was made of at it, its own and then those of earlier steps, for a restarted trainer that
-- replays it.
define('replay', function(run, a)
  local packed, earlier = call('HGET', run .. 'steps', a.version), call('HGET', run .. 'replays', a.version)
  if not packed then
    fail('GONE', 'step ' .. a.version + 1 .. ' cannot be replayed: a checkpoint covers it, or its samples were lost with a '
      .. 'warehouse; resume from the checkpoint')
  end
  local rows = rows_in(run, cmsgpack.unpack(packed))
  local replayed = earlier and rows_of_groups(run, cmsgpack.unpack(earlier)) or {}
  for i = 1, #replayed do rows[#rows + 1] = replayed[i] end
  return describe(run, config(run), rows)
end, true)

-- → the groups {first, last, …} that the next step may train again: those of the last `replay_versions` steps, but for skipped ones
define('replayable', function(run)
  local groups, trained = {}, value(run, 'trained')
  for version = max(0, trained - config(run).replay_versions), trained - 1 do
    local packed = call('SISMEMBER', run .. 'skipped', version) == 0 and call('HGET', run .. 'steps', version)
    local list = packed and cmsgpack.unpack(packed) or {}
    for i = 1, #list do groups[#groups + 1] = list[i] end
  end
  return groups
end, true)

-- {groups = {first, last, …}} → the rows of groups of earlier steps, group by group
define('trained_rows', function(run, a) return describe(run, config(run), rows_of_groups(run, a.groups)) end, true)

-- {before}: a checkpoint covers the steps that were made below version `before`. The rows are released of those that no step from
-- `before` on may train again; → how many groups they were.
define('release_steps', function(run, a)
  local cfg, freed, released = config(run), {}, 0
  for _, version in ipairs(call('HKEYS', run .. 'steps')) do
    if int(version) < a.before then call('HDEL', run .. 'replays', version) end
    if int(version) < a.before - cfg.replay_versions then
      local groups = cmsgpack.unpack(call('HGET', run .. 'steps', version))
      erase_groups(run, cfg, groups, freed)
      call('HDEL', run .. 'steps', version)
      call('SREM', run .. 'skipped', version)
      released = released + size_of(groups)
    end
  end
  wake_all(run, freed)
  return released
end)

local MOST_REASONS = 32  -- that are counted apart, for which groups are dropped

-- Groups that may leave untrained since the last step was trained: `max_dropped` for each group of a step and for each one that
-- is ready to be trained, since a slow trainer has groups of several steps wait; -1: any number. Each step ahead adds its groups,
-- which the credit stage may drop for it.
local function most_dropped(run, cfg)
  if (cfg.max_dropped or -1) < 0 then return -1 end
  local groups = cfg.groups_per_step
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'batch' then groups = groups + value(run, 'ready:' .. stage.name) end
  end
  return cfg.max_dropped * groups + cfg.slack * cfg.groups_per_step
end

-- {stage, token, owner?, groups, reason}: whole groups, held under `token` by a stage that takes groups, leave without being
-- trained. They are counted under the reason. → {groups that left so since the last step was trained, the most that may}
define('drop_groups', function(run, a)
  local cfg, freed, groups = config(run), {}, {}
  local stage = stage_of(cfg, a.stage)
  table.sort(a.groups)
  for _, group in ipairs(a.groups) do append(groups, group, group) end
  local rows = rows_in(run, groups)
  table.sort(rows)  -- groups that were made again may have later rows
  local lease, total = held(run, stage, a.token, a.owner, rows)
  local tokens = tally(run, rows, 'filtered_rows')
  settle(run, a.token, lease, total)
  erase_groups(run, cfg, groups, freed)
  for i = 1, #groups, 2 do cut(run .. 'open', groups[i], groups[i + 1]) end
  rate_groups(run, groups)
  no_longer_spared(run, groups)
  for _, group in ipairs(a.groups) do call('ZADD', run .. 'filtered', group, group) end
  local oldest = call('ZRANGE', run .. 'open', 0, 0)[1]
  call('ZREMRANGEBYSCORE', run .. 'filtered', '-inf', oldest and '(' .. ends(oldest) or '+inf')
  count(run, 'filtered_groups', #a.groups)
  local reason = a.reason
  if call('HEXISTS', run .. 'n', 'dropped:' .. reason) == 0 and count(run, 'drop_reasons', 1) > MOST_REASONS then reason = 'other' end
  count(run, 'dropped:' .. reason, #a.groups)
  count(run, 'dropped_tokens:' .. reason, tokens)
  wake_all(run, freed)
  for _, s in ipairs(cfg.stages) do wake_stage(run, s.name) end
  wake(run, 'version')
  return { value(run, 'filtered_groups') - value(run, 'dropped_before'), most_dropped(run, cfg) }
end)

-- {version, record}: the weights of `version` lie in host memory. The gate opens, and generation may go on.
define('publish_weights', function(run, a)
  local cfg = config(run)
  local trained, published = value(run, 'trained'), value(run, 'published')
  if a.version ~= trained then
    fail('BAD', 'version ' .. a.version .. ' cannot be published: the trainer is at version ' .. trained)
  end
  if a.version < published then fail('BAD', 'version ' .. a.version .. ' is older than the published ' .. published) end
  call('HSET', run .. 'n', 'published', a.version)
  call('SET', run .. 'weights', cmsgpack.pack(a.record))
  call('HSET', run .. 'records', a.version, cmsgpack.pack(a.record))
  for _, version in ipairs(call('HKEYS', run .. 'records')) do
    if int(version) < a.version - 1 then call('HDEL', run .. 'records', version) end
  end
  wake(run, 'version')
  for _, stage in ipairs(cfg.stages) do wake_stage(run, stage.name) end
  return true
end)

-- → {version, record?, wait}
define('published_weights', function(run, a)
  local record = call('GET', run .. 'weights')
  return { version = value(run, 'published'), record = record and cmsgpack.unpack(record) or false, wait = woken(run, 'version') }
end, true)

-- {version} → the record of one of the two newest versions, or false
define('weights_record', function(run, a)
  local record = call('HGET', run .. 'records', a.version)
  return record and cmsgpack.unpack(record) or false
end, true)

-- {worker, most, lease = ms} → {granted, wait, due = ms until the next turn expires, or sooner}: one of the `most` turns to swap weights at
-- the same time. A worker that has one keeps it for another lease.
define('take_swap_turn', function(run, a)
  local key, t = run .. 'swapping', now(run, a.lease)
  call('ZREMRANGEBYSCORE', key, '-inf', t)
  if call('ZSCORE', key, a.worker) or call('ZCARD', key) < a.most then
    call('ZADD', key, t + a.lease, a.worker)
    return { granted = true }
  end
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return { granted = false, wait = woken(run, 'swap'), due = look_again(run, first[2] - t) }
end)

-- {worker}: its turn ends; the next worker may swap.
define('end_swap_turn', function(run, a)
  if call('ZREM', run .. 'swapping', a.worker) == 1 then wake(run, 'swap') end
  return true
end)
