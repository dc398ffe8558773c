-- Rows and groups: which are ready for which stage, and how they are removed.

-- The homes by which a stage's ready rows are kept: its warehouses. Train batches ignore nearness.
local function homes(run, stage)
  if stage.takes == 'batch' then return { 0 } end
  local out = {}
  for home = 0, value(run, 'warehouses') do out[home + 1] = home end
  return out
end

-- Rows that become ready on a node where their stage has workers are left to these for a headstart, because elsewhere they
-- would cross the network. `since` is when the rows of a home began to be ready there; 0: without a headstart.
local function own(cfg, since, t) return since > 0 and t - since < (cfg.headstart or 0) end

-- Adds ranges to what can be claimed from a stage, and wakes the claims that wait for them.
local function make_ready(run, stage, home, list)
  if stage.takes == 'batch' then home = 0 end
  local key, total = run .. 'ready:' .. stage.name .. ':' .. home, size_of(list)
  if total == 0 then return end
  local there = call('EXISTS', key) == 1
  for i = 1, #list, 2 do add(key, list[i], list[i + 1]) end
  count(run, 'ready:' .. stage.name, total)
  -- The gate may wait for them, see `replacements_wait`.
  if stage.takes == 'batch' and config(run).slack == 0 and value(run, 'filtered_groups') > 0 then wake(run, 'version') end
  if stage.takes == 'batch' or value(run, 'warehouses') < 2 then return wake_stage(run, stage.name) end
  local t, place = now(run), stage.name .. ':' .. home
  local waits = wake_idle(run, place)
  if not there then
    local near = waits or t - value(run, 'seen:' .. place) < PRESENT
    call('HSET', run .. 'n', 'since:' .. place, near and t or 0)
  end
  if waits and own(config(run), value(run, 'since:' .. place), t) then
    wake_idle(run, stage.name)  -- that claim wakes the others, if it leaves rows
  else
    wake_stage(run, stage.name, t)
  end
end

-- Removes rows (or groups) a..b from what can be claimed from a stage.
local function not_ready(run, stage, a, b)
  if value(run, 'ready:' .. stage.name) == 0 then return end
  for _, home in ipairs(homes(run, stage)) do
    local gone = cut(run .. 'ready:' .. stage.name .. ':' .. home, a, b)
    if gone > 0 then count(run, 'ready:' .. stage.name, -gone) end
  end
end

-- The first row of a group and how many it has; 0 when the group is not in the run.
local function rows_of(run, group)
  local first, n = unpack_at('<I6I2', read(run, 'q', 8, group, group))
  return first, n  -- n is 0 when the group is not there
end

-- The rows of groups {first, last, …} as ranges, in the order of the groups, without groups that are not in the run.
local function rows_in(run, groups)
  local rows = {}
  for i = 1, #groups, 2 do
    local from = groups[i]
    while from <= groups[i + 1] do  -- in pieces, to keep strings short
      local to = min(groups[i + 1], from + SEGMENT - 1)
      local bytes = read(run, 'q', 8, from, to)
      for j = 0, to - from do
        local first, n = unpack_at('<I6I2', bytes, 8 * j + 1)
        if n > 0 then append(rows, first, first + n - 1) end
      end
      from = to + 1
    end
  end
  return rows
end

-- → samples of these ranges of rows that are generated and not trained, their tokens and turns
local function generated_in(run, rows)
  local samples, tokens, turns, has_turns = 0, 0, 0, value(run, 'generated_turns') > 0
  for i = 1, #rows, 2 do
    local from, to = rows[i], rows[i + 1]
    local made, turns_made = read(run, 'g', 8, from, to), has_turns and read(run, 'turns', 4, from, to)
    stretches(read(run, 's', 8, from, to), function(entry, x, y)
      local _, _, state = unpack_at('<I4I2I1', entry)
      if state ~= GENERATED then return end  -- a prompt without a response was never counted
      samples, tokens = samples + y - x + 1, tokens + sum_of(made, 8, 5, x, y)
      if has_turns then turns = turns + sum_of(turns_made, 4, 1, x, y) end
    end)
  end
  return samples, tokens, turns
end

-- Collects the stages that can now claim rows from..to, which had the columns `before` and now have `after`: `offers` maps a
-- stage to ranges of rows or groups.
local function offer(run, cfg, from, to, before, after, offers)
  local fixed
  for _, stage in ipairs(cfg.stages) do
    local is_offered = stage.origin == stage.name  -- another one gets its rows from the stage that it takes turns with
    if is_offered and band(after, stage.needs) == stage.needs and band(before, stage.needs) ~= stage.needs then
      local list = offers[stage.name] or {}
      offers[stage.name] = list
      if stage.takes == 'rows' then
        append(list, from, to)
      else
        fixed = fixed or read(run, 'f', 8, from, to)
        local i, n = 0, to - from + 1
        while i < n do
          local group, place, size = unpack_at('<I4I2I2', fixed, 8 * i + 1)
          local here = min(size - place, n - i)
          if here == size then
            append(list, group, group)
          elseif call('HINCRBY', run .. 'count:' .. stage.name, group, here) == size then
            call('HDEL', run .. 'count:' .. stage.name, group)
            append(list, group, group)
          end
          i = i + here
        end
      end
    end
  end
end

local function make_offers(run, cfg, home, offers)
  for name, list in pairs(offers) do make_ready(run, stage_of(cfg, name), home, list) end
end

-- S: how many steps admission runs ahead now. A run may have set it below the one of its config.
local function slack_of(run, cfg)
  return tonumber(call('HGET', run .. 'n', 'slack') or cfg.slack)
end

-- The number below which a stage at policy version v may touch groups: admitted < (v + S + 1)·P. A filtered group makes room
-- for one more, but only for one after it: groups that left before an old straggler must not count for it.
local function gate(run, cfg, version)
  local base, ahead = (version + slack_of(run, cfg) + 1) * cfg.groups_per_step + value(run, 'filtered_groups'), 0
  while true do
    local limit = base - ahead
    ahead = call('ZCOUNT', run .. 'filtered', limit, '+inf')
    if base - ahead == limit then return limit end
  end
end

-- Whether groups in the place of filtered ones are not to be admitted yet. With slack 0 they enter together, when all other open
-- groups wait for training, as in a loop without asynchrony: what is decoded together does not depend on when a drop was known.
local function replacements_wait(run, cfg)
  if cfg.slack ~= 0 or value(run, 'filtered_groups') == 0 then return false end
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'batch' then
      return value(run, 'ready:' .. stage.name) < size_of(members(run .. 'open'))
    end
  end
  return false
end

-- Rows from..to have no parked progress any more. Only a stage that takes groups has any.
local function end_progress(run, stage, from, to)
  if stage.takes ~= 'groups' then return end
  if call('EXISTS', run .. 'begun:' .. stage.origin) == 1 then cut(run .. 'begun:' .. stage.origin, from, to) end
  if call('EXISTS', run .. 'holder:' .. stage.name) == 1 then
    for row = from, to do call('HDEL', run .. 'holder:' .. stage.name, row) end
  end
  if call('EXISTS', run .. 'parked:' .. stage.name) == 0 then return end
  local gone = cut(run .. 'parked:' .. stage.name, from, to)
  if gone > 0 then count(run, 'parked:' .. stage.name, -gone) end
end

-- Removes rows: their state, their places in every queue, their bytes.
local function erase_rows(run, cfg, from, to, freed)
  local producers, n = {}, to - from + 1
  for producer = 0, cfg.producers - 1 do producers[producer + 1] = producer end
  let_go(run, producers, from, to, freed)
  write(run, 's', 8, from, rep('\0', 8 * n))
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'rows' then not_ready(run, stage, from, to) end
    end_progress(run, stage, from, to)
  end
  occupy(run, cfg, 's', from, to, -1, value(run, 'rows') - 1)
  count(run, 'live', -n)
end

-- Removes groups {first, last, …} with their rows.
local function erase_groups(run, cfg, groups, freed)
  local rows = rows_in(run, groups)
  for i = 1, #rows, 2 do erase_rows(run, cfg, rows[i], rows[i + 1], freed) end
  for i = 1, #groups, 2 do
    local from, to = groups[i], groups[i + 1]
    write(run, 'q', 8, from, rep('\0', 8 * (to - from + 1)))
    occupy(run, cfg, 'q', from, to, -1, value(run, 'admitted') - 1)
    for _, stage in ipairs(cfg.stages) do
      if stage.takes ~= 'rows' then
        not_ready(run, stage, from, to)
        for _, key in ipairs({ 'count:', 'partial:' }) do
          if call('EXISTS', run .. key .. stage.name) == 1 then
            for group = from, to do call('HDEL', run .. key .. stage.name, group) end
          end
        end
      end
    end
  end
end
