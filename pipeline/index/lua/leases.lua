-- Leases: they end by a commit, by a hand-back, when they expire, or when their worker is forgotten.

local function lease_of(run, token)
  local packed = call('HGET', run .. 'leases', token)
  return packed and cmsgpack.unpack(packed)
end

-- The lease when `token` belongs to `owner` (nil: the run's own workers). Another owner's token is treated as one that has
-- ended.
local function lease_of_owner(run, token, owner)
  local lease = lease_of(run, token)
  return lease and lease[7] == (owner or '') and lease
end

local function drop_lease(run, token, lease)
  call('ZREM', run .. 'due:' .. lease[1], token)
  call('HDEL', run .. 'leases', token)
  -- Claims wait for leased rows to come back, and none can any more.
  if call('EXISTS', run .. 'due:' .. lease[1]) == 0 then wake_stage(run, lease[1]) end
end

-- `n` rows leave the lease; it ends with the last one.
local function settle(run, token, lease, n)
  lease[4] = lease[4] - n
  if lease[4] <= 0 then drop_lease(run, token, lease) else call('HSET', run .. 'leases', token, cmsgpack.pack(lease)) end
end

-- Rows can be claimed, with their progress, by any worker of the stage.
local function make_parked(run, stage, rows)
  local total = 0
  for i = 1, #rows, 2 do
    add(run .. 'parked:' .. stage.name, rows[i], rows[i + 1])
    total = total + rows[i + 1] - rows[i] + 1
  end
  if total == 0 then return 0 end
  count(run, 'parked:' .. stage.name, total)
  wake_stage(run, stage.name)
  return total
end

-- Ends a lease. Its rows can be claimed again, those with progress one by one, except those that were committed or that
-- another stage dropped in the meantime.
local function expire(run, cfg, token)
  local lease = lease_of(run, token)
  local stage, back, list = stage_of(cfg, lease[1]), 0, {}
  local ranges = lease[3]
  if stage.takes == 'groups' and call('EXISTS', run .. 'begun:' .. stage.name) == 1 then
    ranges = {}
    for i = 1, #lease[3], 2 do
      local begun, others = split(run .. 'begun:' .. stage.name, lease[3][i], lease[3][i + 1])
      back = back + make_parked(run, stage, begun)
      for _, edge in ipairs(others) do ranges[#ranges + 1] = edge end
    end
  end
  for i = 1, #ranges, 2 do
    local from = ranges[i]
    local bytes = read(run, 's', 8, from, ranges[i + 1])
    stretches(bytes, function(entry, a, b)
      local _, done, state = unpack_at('<I4I2I1', entry)
      if state == 0 then return end
      if band(done, stage.bit) == 0 then
        back = back + b - a + 1
        if stage.takes == 'rows' then append(list, from + a, from + b) end
      end
    end)
    if stage.takes ~= 'rows' then
      local fixed, k = read(run, 'f', 8, from, ranges[i + 1]), 0
      while k < #bytes / 8 do
        local group, place, size = unpack_at('<I4I2I2', fixed, 8 * k + 1)
        local n, left = min(size - place, #bytes / 8 - k), 0
        for j = k, k + n - 1 do
          local _, done, state = unpack_at('<I4I2I1', bytes, 8 * j + 1)
          if state ~= 0 and band(done, stage.bit) == 0 then left = left + 1 end
        end
        if left > 0 then
          if list[#list] ~= group then append(list, group, group) end
          if left < size then call('HSET', run .. 'partial:' .. stage.name, group, 1) end
        end
        k = k + n
      end
    end
  end
  drop_lease(run, token, lease)
  if back > 0 then
    count(run, 'redelivered', back)
    make_ready(run, stage, lease[5], list)
  end
end

-- Ends the expired leases of a stage.
local function reap(run, cfg, stage, t)
  for _, token in ipairs(call('ZRANGEBYSCORE', run .. 'due:' .. stage.name, '-inf', t)) do expire(run, cfg, token) end
end

-- Rows {first, last, …} as a claim returns them: parallel arrays, in this order. `reads` are the producers whose places are
-- given (nil: all); the arrays of the others are empty.
local function describe(run, cfg, rows, reads)
  local fixed, made, refs, wanted = {}, {}, {}, {}
  for producer = 1, cfg.producers do refs[producer], wanted[producer] = {}, not reads end
  for _, producer in ipairs(reads or {}) do wanted[producer + 1] = true end
  for i = 1, #rows, 2 do
    local from, to, at = rows[i], rows[i + 1], #fixed + 1
    fixed[at], made[at] = read(run, 'f', 8, from, to), read(run, 'g', 8, from, to)
    for producer = 1, cfg.producers do
      if wanted[producer] then refs[producer][at] = read(run, 'b' .. (producer - 1), 16, from, to) end
    end
  end
  for producer = 1, cfg.producers do refs[producer] = table.concat(refs[producer]) end
  return { rows = rows, fixed = table.concat(fixed), made = table.concat(made), refs = refs }
end

-- {stage, tokens, lease, owner?} → the tokens that still hold.
define('renew', function(run, a)
  local t, kept = now(), {}
  for _, token in ipairs(a.tokens) do
    local lease = lease_of_owner(run, token, a.owner)
    if lease and lease[1] == a.stage then
      call('ZADD', run .. 'due:' .. a.stage, t + a.lease, token)
      kept[#kept + 1] = token
    end
  end
  return kept
end)

-- {token, owner?} → the rows of its claim without those that were parked since, and {stage, worker, left = rows neither
-- committed nor parked}; false when it has ended. For a client that knows only the token.
define('lease', function(run, a)
  local lease = lease_of_owner(run, a.token, a.owner)
  if not lease then return false end
  local cfg = config(run)
  local out = describe(run, cfg, lease[3], stage_of(cfg, lease[1]).reads)
  out.stage, out.worker, out.left = lease[1], lease[2], lease[4]
  return out
end, true)

-- {stage, token, owner?}: end the lease; its rows can be claimed again at once.
define('hand_back', function(run, a)
  local lease = lease_of_owner(run, a.token, a.owner)
  if lease and lease[1] == a.stage then expire(run, config(run), a.token) end
  return true
end)

-- {worker}: it is dead. End its leases now, and free the blocks that it holds open.
define('forget_worker', function(run, a)
  local cfg, freed = config(run), {}
  if call('ZREM', run .. 'swapping', a.worker) == 1 then wake(run, 'swap') end
  local leases = call('HGETALL', run .. 'leases')
  for i = 1, #leases, 2 do
    if cmsgpack.unpack(leases[i + 1])[2] == a.worker then expire(run, cfg, leases[i]) end
  end
  for _, block in ipairs(call('SMEMBERS', run .. 'open:' .. a.worker)) do unreference(run, block, 1, freed) end
  call('DEL', run .. 'open:' .. a.worker)
  wake_all(run, freed)
  return true
end)
