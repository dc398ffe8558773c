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

local function drop_lease(run, token, lease, come_back)
  call('ZREM', run .. 'due:' .. lease[1], token)
  call('HDEL', run .. 'leases', token)
  if come_back then return end
  -- Claims wait for leased rows to come back, and none can any more.
  if call('EXISTS', run .. 'due:' .. lease[1]) == 0 then wake_stage(run, lease[1]) end
end

-- `n` rows leave the lease; it ends with the last one. `come_back`: they are parked.
local function settle(run, token, lease, n, come_back)
  lease[4] = lease[4] - n
  count(run, 'settled', n)
  if lease[4] <= 0 then
    drop_lease(run, token, lease, come_back)
  else
    call('HSET', run .. 'leases', token, cmsgpack.pack(lease))
  end
end

-- Rows can be claimed, with their progress, by any worker of the stage.
local function make_parked(run, stage, rows)
  local total = size_of(rows)
  if total == 0 then return 0 end
  for i = 1, #rows, 2 do add(run .. 'parked:' .. stage.name, rows[i], rows[i + 1]) end
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
  if stage.takes == 'groups' and call('EXISTS', run .. 'begun:' .. stage.origin) == 1 then
    ranges = {}
    for i = 1, #lease[3], 2 do
      local begun, others = split(run .. 'begun:' .. stage.origin, lease[3][i], lease[3][i + 1])
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
          if left < size then call('HSET', run .. 'partial:' .. stage.origin, group, 1) end
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
  local t, kept = now(run, a.lease), {}
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

-- A claim that a worker has left to wait on the server is made there after it is taken for dead: for so long it gets nothing.
local FORGOTTEN_SECONDS = 3600

-- {worker, ended}: it is taken for dead. End its leases now. `ended`: its process writes no more for certain, so the blocks
-- that it holds open are freed. Otherwise it may still write into them: they stay, until it closes them.
define('forget_worker', function(run, a)
  local cfg, freed = config(run), {}
  if call('ZREM', run .. 'swapping', a.worker) == 1 then wake(run, 'swap') end
  local leases = call('HGETALL', run .. 'leases')
  for i = 1, #leases, 2 do
    if cmsgpack.unpack(leases[i + 1])[2] == a.worker then expire(run, cfg, leases[i]) end
  end
  if a.ended then
    for _, block in ipairs(call('SMEMBERS', run .. 'open:' .. a.worker)) do unreference(run, block, 1, freed) end
    call('DEL', run .. 'open:' .. a.worker)
  end
  call('HDEL', run .. 'alive', a.worker)
  call('SADD', run .. 'forgotten', a.worker)
  call('EXPIRE', run .. 'forgotten', FORGOTTEN_SECONDS)
  wake_all(run, freed)
  return true
end)

-- The way of rows through the stages: admit, claim, park, commit.

-- Checks that `bytes` has `width` bytes for each of n rows.
local function check_width(name, bytes, width, n)
  if #bytes ~= width * n then fail('BAD', name .. ': ' .. #bytes .. ' bytes for ' .. n .. ' rows; give ' .. width .. ' for each') end
end

-- {worker, home, block, close, mask, refs, groups = {{group or nil, how many groups, samples of each}…}} → next group. Groups
-- enter the run: new ones in order (nil: the next numbers), or lost ones again. `refs` are the places of all rows.
define('admit', function(run, a)
  local cfg, offers = config(run), {}
  local next_group, limit = value(run, 'admitted'), gate(run, cfg, value(run, 'published'))
  local total, first_new = 0, value(run, 'admitted')
  for _, entry in ipairs(a.groups) do
    if not entry[1] then entry[1] = next_group end
    if entry[3] < 1 or entry[3] > 65535 then
      fail('BAD', 'group ' .. entry[1] .. ' has ' .. entry[3] .. ' samples; give it 1 to 65535')
    end
    for group = entry[1], entry[1] + entry[2] - 1 do
      if group >= next_group or call('SISMEMBER', run .. 'remake', group) == 0 then
        if group ~= next_group then fail('BAD', 'group ' .. group .. ' is out of order: the next one is ' .. next_group) end
        if group >= limit then fail('GATE', 'group ' .. group .. ' is past the gate, which stands at ' .. limit) end
        next_group = next_group + 1
      end
    end
    total = total + entry[2] * entry[3]
  end
  check_width('refs', a.refs, 16, total)
  refer(run, a.worker, a.block, total, a.close)
  local first = count(run, 'rows', total) - total
  local row = first
  local fixed = {}
  for _, entry in ipairs(a.groups) do
    local records, size, at = {}, entry[3], #fixed
    for i = 0, entry[2] - 1 do
      records[2 * i + 1], records[2 * i + 2] = row, size
      for place = 0, size - 1 do
        fixed[at + 1], fixed[at + 2] = entry[1] + i, place + 65536 * size  -- place u16, samples u16
        at = at + 2
      end
      row = row + size
    end
    write(run, 'q', 8, entry[1], pack_pairs('I6I2', records))
    occupy(run, cfg, 'q', entry[1], entry[1] + entry[2] - 1, 1, next_group - 1)
    if entry[1] < first_new then
      for group = entry[1], entry[1] + entry[2] - 1 do call('SREM', run .. 'remake', group) end
    end
  end
  if next_group > first_new then add(run .. 'open', first_new, next_group - 1) end
  write(run, 's', 8, first, rep(pack('<I4I2I1I1', a.mask, 0, LIVE, 0), total))
  write(run, 'f', 8, first, pack_pairs('I4I4', fixed))
  write(run, 'g', 8, first, rep(pack('<i4I4', -1, 0), total))
  write(run, 'b0', 16, first, a.refs)
  occupy(run, cfg, 's', first, row - 1, 1, row - 1)
  count(run, 'live', total)
  call('HSET', run .. 'n', 'admitted', next_group)
  offer(run, cfg, first, row - 1, 0, a.mask, offers)
  make_offers(run, cfg, a.home, offers)
  return next_group
end)

-- The groups that the update may take now, as ranges: P of them in order, past a straggler only inside the window W that begins
-- at the oldest group left behind.
local function pick_window(run, cfg, stage)
  if value(run, 'ready:' .. stage.name) < cfg.groups_per_step then return {} end
  local ready = call('ZRANGE', run .. 'ready:' .. stage.name .. ':0', 0, -1)
  local picked, n, anchor, at = {}, 0, nil, 1
  local from, to = ends(ready[1])
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    for group = first, last do
      while to and to < group do
        at = at + 1
        if ready[at] then from, to = ends(ready[at]) else from, to = nil, nil end
      end
      if not to or (anchor and group >= anchor + cfg.window) then return {} end
      if group >= from then
        append(picked, group, group)
        n = n + 1
        if n == cfg.groups_per_step then return picked end
      elseif not anchor then
        anchor = group
      end
    end
  end
  return {}
end

-- Takes up to `most` ready rows (or groups) below `limit`, near ones first. An older one elsewhere is passed only while it is
-- at most `reach` groups older, so nothing waits for ever on a node without a worker. A patient claim leaves what just became
-- ready elsewhere to the workers there; the last result is in how many ms it need not.
local function take(run, cfg, stage, most, limit, home, patient, t)
  local taken, n, nearest, due, places = {}, 0, nil, nil, {}
  for _, place in ipairs(homes(run, stage)) do
    local since = patient and int(place) ~= home and value(run, 'since:' .. stage.name .. ':' .. place) or 0
    if own(cfg, since, t) then
      if call('EXISTS', run .. 'ready:' .. stage.name .. ':' .. place) == 1 then
        due = min(due or cfg.headstart, since + cfg.headstart - t)
      end
    else
      places[#places + 1] = place
    end
  end
  while n < most do
    local best, best_first, near, near_first
    for _, place in ipairs(places) do
      local member = call('ZRANGE', run .. 'ready:' .. stage.name .. ':' .. place, 0, 0)[1]
      if member then
        local first = ends(member)
        if not best or first < best_first then best, best_first = { place, member }, first end
        if int(place) == home then near, near_first = { place, member }, first end
      end
    end
    if not best then break end
    if near and near_first ~= best_first then
      local behind = near_first - best_first
      if stage.takes == 'rows' then  -- count groups, not rows
        behind = unpack_at('<I4', read(run, 'f', 8, near_first, near_first))
          - unpack_at('<I4', read(run, 'f', 8, best_first, best_first))
      end
      if behind <= cfg.reach and not (limit and near_first >= limit) then best = near end
    end
    local first, last = ends(best[2])
    if limit and first >= limit then break end
    local to = min(last, first + most - n - 1, limit and limit - 1 or last)
    local key = run .. 'ready:' .. stage.name .. ':' .. best[1]
    call('ZREM', key, best[2])
    if to < last then call('ZADD', key, to + 1, range(to + 1, last)) end
    append(taken, first, to)
    n, nearest = n + to - first + 1, best[1]
  end
  return taken, n, nearest, due
end

-- In how many ms a parked row that another worker holds may be taken by `worker`; nil: at once.
local function held_for(run, cfg, stage, row, worker, t)
  local since, holder = (call('HGET', run .. 'holder:' .. stage.name, row) or ''):match('^(%d+) (.*)')
  local left = holder and holder ~= worker and tonumber(since) + (cfg.headstart or 0) - t
  return left and left > 0 and left or nil
end

-- Parked rows whose group lies below `limit`, in order, at most as many as `most` groups have room for: a row counts as its
-- share of a group. Rows that another worker holds are left to it for a headstart. Returns the rows as ranges, for how many
-- groups there is room left, and in how many ms another row can be taken.
local function take_parked(run, cfg, stage, most, limit, worker, t)
  local rows, share, total, due = {}, 0, 0, nil
  local are_held = call('EXISTS', run .. 'holder:' .. stage.name) == 1
  for _, member in ipairs(call('ZRANGE', run .. 'parked:' .. stage.name, 0, -1)) do
    local from, to = ends(member)
    local fixed = read(run, 'f', 8, from, to)
    for row = from, to do
      local group, _, size = unpack_at('<I4I2I2', fixed, 8 * (row - from) + 1)
      local left = are_held and held_for(run, cfg, stage, row, worker, t)
      if left then
        due = min(due or left, left)
      elseif not limit or group < limit then
        share = share + 1 / size
        if share > most + 1e-6 then break end
        append(rows, row, row)
        total = total + 1
      end
    end
    if share > most + 1e-6 then break end
  end
  for i = 1, #rows, 2 do cut(run .. 'parked:' .. stage.name, rows[i], rows[i + 1]) end
  if total > 0 then count(run, 'parked:' .. stage.name, -total) end
  return rows, floor(max(0, most - share) + 1e-6), due
end

-- The rows of claimed groups that this stage has neither committed nor begun.
local function not_done(run, stage, groups)
  if call('EXISTS', run .. 'partial:' .. stage.origin) == 0 then return rows_in(run, groups) end
  local rows = {}
  for i = 1, #groups, 2 do
    for group = groups[i], groups[i + 1] do
      local first, n = rows_of(run, group)
      if call('HDEL', run .. 'partial:' .. stage.origin, group) == 0 then
        append(rows, first, first + n - 1)
      else
        local _, fresh = split(run .. 'begun:' .. stage.origin, first, first + n - 1)
        for k = 1, #fresh, 2 do
          stretches(read(run, 's', 8, fresh[k], fresh[k + 1]), function(entry, a, b)
            local _, done = unpack_at('<I4I2', entry)
            if band(done, stage.bit) == 0 then append(rows, fresh[k] + a, fresh[k] + b) end
          end)
        end
      end
    end
  end
  return rows
end

-- Where and how long a claim at time t waits that has found nothing; `due`: ms until it may find something without a wake-up.
local function wait_for(run, stage, topic, due, t)
  local lease = call('ZRANGE', run .. 'due:' .. stage.name, 0, 0, 'WITHSCORES')
  call('HSET', run .. 'n', 'idle:' .. topic, 1, 'until:' .. topic, t + (due or 0))
  if lease[2] then due = min(due or lease[2], max(1, lease[2] - t + 1)) end
  return { wait = woken(run, topic), topic = topic, due = due and look_again(run, due) or false }
end

-- {stage, worker, home, most, least, lease, version, patient, token, owner?, waits} → {rows, fixed, made, refs}, or {wait, topic, due =
-- ms until the next lease or headstart ends, or sooner}; both where the rows were the last ones. `most` and `least` count rows or
-- groups as the stage takes them; fewer than `least` are not given out. A stage that generates gives the policy version it has loaded, and gets no group that this
-- version may not touch. Parked rows come first, each counted as its share of a group; `refs` also point to their progress.
define('claim', function(run, a)
  local cfg, t = config(run), now(run, a.lease)
  local stage = stage_of(cfg, a.stage)
  reap(run, cfg, stage, t)
  if call('SREM', run .. 'forgotten', a.worker) == 1 and a.waits then return wait_for(run, stage, stage.name, 1, t) end
  local taken, n, home, due, parked, most = {}, 0, nil, nil, {}, floor(a.most)
  local several = stage.takes ~= 'batch' and value(run, 'warehouses') > 1
  local patient, topic = several and a.patient and a.home > 0, stage.name
  if patient then
    topic = stage.name .. ':' .. int(a.home)
    call('HSET', run .. 'n', 'seen:' .. topic, t)
  end
  local limit = a.version and gate(run, cfg, a.version)
  if stage.takes == 'groups' and value(run, 'parked:' .. stage.name) > 0 then
    parked, most, due = take_parked(run, cfg, stage, a.most, limit, a.worker, t)
  end
  if value(run, 'ready:' .. stage.name) < (a.least or 1) then
    taken, n = {}, 0
  elseif stage.takes == 'batch' then
    taken, home = pick_window(run, cfg, stage), 0
  elseif most > 0 then
    local headstart
    taken, n, home, headstart = take(run, cfg, stage, most, limit, a.home, patient, t)
    due = due and headstart and min(due, headstart) or due or headstart
  end
  if #taken == 0 and #parked == 0 then return wait_for(run, stage, topic, due, t) end
  if several and value(run, 'ready:' .. stage.name) > n then wake_stage(run, stage.name, t) end
  local rows, reads = taken, stage.reads
  if stage.takes ~= 'rows' then rows = not_done(run, stage, taken) end
  if #parked > 0 then
    for _, edge in ipairs(rows) do parked[#parked + 1] = edge end
    rows, reads = parked, { stage.producer, unpack(reads) }
  end
  if stage.takes == 'batch' then
    local trained = value(run, 'trained')
    for i = 1, #rows, 2 do
      local made = read(run, 'g', 8, rows[i], rows[i + 1])
      for j = 0, rows[i + 1] - rows[i] do
        local oldest = unpack_at('<i4', made, 8 * j + 1)
        if trained - oldest > cfg.staleness then
          fail('STALE', 'row ' .. rows[i] + j .. ' was made by version ' .. oldest .. ' and would be trained at version '
            .. trained .. ': more than the bound ' .. cfg.staleness)
        end
      end
    end
    for i = 1, #taken, 2 do not_ready(run, stage, taken[i], taken[i + 1]) end
  elseif n > 0 then
    count(run, 'ready:' .. stage.name, -n)
  end
  local pairs_of, left = {}, size_of(rows)
  for i = 1, #rows, 2 do pairs_of[#pairs_of + 1] = { rows[i], rows[i + 1] } end
  table.sort(pairs_of, function(x, y) return x[1] < y[1] end)
  local held = {}
  for _, pair in ipairs(pairs_of) do append(held, pair[1], pair[2]) end
  local owner = a.owner or ''
  call('HSET', run .. 'leases', a.token, cmsgpack.pack({ stage.name, a.worker, held, left, int(home), t, owner }))
  call('ZADD', run .. 'due:' .. stage.name, t + a.lease, a.token)
  local reply = describe(run, cfg, rows, reads)
  if stage.takes ~= 'batch' and value(run, 'ready:' .. stage.name) <= 0 and value(run, 'parked:' .. stage.name) <= 0 then
    for key, known in pairs(wait_for(run, stage, topic, nil, t)) do reply[key] = known end
  end
  return reply, { rows, reads }
end, false, function(run, kept)
  return kept[1] and describe(run, config(run), kept[1], kept[2]) or kept
end)

-- Checks that rows {first, last, …} (ascending) exist and are held under `token` by `owner`. Returns the lease, how many rows
-- they are, and for each range its stretches {first, last, columns, done, state} of equal state.
local function held(run, stage, token, owner, rows)
  local lease, total, out, at = lease_of_owner(run, token, owner), 0, {}, 1
  if lease and lease[1] ~= stage.name then lease = nil end
  for i = 1, #rows, 2 do
    local from, to = rows[i], rows[i + 1]
    if i > 1 and from <= rows[i - 1] then fail('TWICE', 'row ' .. from .. ' is given twice in one call; give each row once') end
    total = total + to - from + 1
    local parts = {}
    stretches(read(run, 's', 8, from, to), function(entry, x, y)
      local columns, done, state = unpack_at('<I4I2I1', entry)
      if state == 0 then fail('GONE', 'row ' .. from + x .. ' was released; this handle is stale') end
      parts[#parts + 1] = { from + x, from + y, columns, done, state }
    end)
    local ranges = lease and lease[3] or {}
    while ranges[at] and ranges[at + 1] < from do at = at + 2 end
    for _, part in ipairs(parts) do
      local lost = (not ranges[at] or part[1] < ranges[at] or band(part[4], stage.bit) ~= 0) and part[1]
        or part[2] > ranges[at + 1] and ranges[at + 1] + 1
      if lost then
        fail('LEASE', 'row ' .. lost .. ' is no longer held by token ' .. token .. ' of stage ' .. stage.name
          .. ': the lease expired, or the row is committed already')
      end
    end
    out[#out + 1] = parts
  end
  return lease, total, out
end

-- Checks that the versions and tokens of rows that were parked before only grow: the oldest version cannot become newer. The
-- staleness bound rests on this. Nor can the tokens become fewer, unless the stage is one that another takes turns with: it may
-- cut some off. A row without a token may be told anew: it has begun again.
local function check_progress(run, cfg, stage, rows, made)
  local at, may_cut = 0, false
  for _, other in ipairs(cfg.stages) do
    may_cut = may_cut or (other.origin == stage.name and other.name ~= stage.name)
  end
  for i = 1, #rows, 2 do
    local begun = split(run .. 'begun:' .. stage.origin, rows[i], rows[i + 1])
    for j = 1, #begun, 2 do
      local before = read(run, 'g', 8, begun[j], begun[j + 1])
      for row = begun[j], begun[j + 1] do
        local oldest, tokens = unpack_at('<i4I4', before, 8 * (row - begun[j]) + 1)
        local now_oldest, now_tokens = unpack_at('<i4I4', made, 8 * (at + row - rows[i]) + 1)
        local is_new = tokens == 0 or now_tokens == 0
        if not is_new and (now_oldest > oldest or (now_tokens < tokens and not may_cut)) then
          fail('BAD', 'row ' .. row .. ' was begun by version ' .. oldest .. ' with ' .. tokens .. ' tokens, and cannot be of version '
            .. now_oldest .. ' with ' .. now_tokens .. '; tell the oldest version and the number of all of its tokens')
        end
      end
    end
    at = at + rows[i + 1] - rows[i] + 1
  end
end

-- Notes which worker of `stage` held rows that it parks for the stage `to`, and when those come back that one of `to` held.
local function note_holders(run, stage, to, worker, rows)
  local t
  for i = 1, #rows, 2 do
    for row = rows[i], rows[i + 1] do
      local holder = to.name ~= to.origin and (call('HGET', run .. 'holder:' .. to.name, row) or ''):match(' (.*)')
      if stage.name == to.name then
        if holder then call('HDEL', run .. 'holder:' .. to.name, row) end
      elseif holder then
        t = t or now(run)
        call('HSET', run .. 'holder:' .. to.name, row, t .. ' ' .. holder)
      elseif stage.name ~= stage.origin then
        call('HSET', run .. 'holder:' .. stage.name, row, '0 ' .. worker)
      end
    end
  end
end

-- {stage, worker, home, token, owner?, to, block, close, mask, rows = {first, last, …}, refs, made, spare, reserve} → {block,
-- offset} of a block of `spare` bytes for the worker's next call, or false (see `spare_room`). Store what was made of these rows so far. They leave the lease unfinished, and can be claimed one by one, from this stage or from the one that takes
-- turns with it (`to`; '': this one); their earlier progress is freed.
define('park', function(run, a)
  local cfg, freed = config(run), {}
  local stage = stage_of(cfg, a.stage)
  local to = a.to and a.to ~= '' and stage_of(cfg, a.to) or stage
  if to.origin ~= stage.origin then
    fail('BAD', 'stage ' .. stage.name .. ' does not take turns with ' .. to.name .. ', and hands it no rows')
  end
  if stage.takes ~= 'groups' or stage.producer < 0 then
    fail('BAD', 'stage ' .. stage.name .. ' takes ' .. stage.takes .. '; only one that takes groups and makes columns can park rows')
  end
  local lease, total, ranges = held(run, stage, a.token, a.owner, a.rows)
  if a.mask == 0 or band(a.mask, stage.makes) ~= a.mask then
    fail('BAD', 'stage ' .. stage.name .. ' parks columns that it does not declare as produced')
  end
  for _, parts in ipairs(ranges) do
    for _, part in ipairs(parts) do
      if part[5] ~= LIVE then fail('TWICE', 'row ' .. part[1] .. ' is generated already') end
    end
  end
  check_width('refs', a.refs, 16, total)
  check_width('made', a.made, 8, total)
  check_progress(run, cfg, stage, a.rows, a.made)
  refer(run, a.worker, a.block, total, a.close)
  local at, left = 0, {}
  for i = 1, #a.rows, 2 do
    local from, to = a.rows[i], a.rows[i + 1]
    local n = to - from + 1
    let_go(run, { stage.producer }, from, to, freed)
    write(run, 'b' .. stage.producer, 16, from, sub(a.refs, 16 * at + 1, 16 * (at + n)))
    write(run, 'g', 8, from, sub(a.made, 8 * at + 1, 8 * (at + n)))
    cut(run .. 'begun:' .. stage.origin, from, to)
    add(run .. 'begun:' .. stage.origin, from, to)
    at = at + n
  end
  at = 1
  for i = 1, #lease[3], 2 do  -- the parked rows lie inside the lease's ranges, both ascending
    local from, to = lease[3][i], lease[3][i + 1]
    while a.rows[at] and a.rows[at] <= to do
      if from < a.rows[at] then append(left, from, a.rows[at] - 1) end
      from, at = a.rows[at + 1] + 1, at + 2
    end
    if from <= to then append(left, from, to) end
  end
  lease[3] = left
  settle(run, a.token, lease, total, true)
  note_holders(run, stage, to, a.worker, a.rows)
  make_parked(run, to, a.rows)
  wake_all(run, freed)
  return spare_room(run, a.worker, a.home, a.spare or 0, a.reserve or 0)
end)

-- {stage, worker, home, token, owner?, block, close, mask, rows = {first, last, …}, refs, made?, turns?}: add the columns and end the
-- rows' lease. `refs` are the rows' places in the block; `made` (oldest version, tokens) is given by a stage that generates, and
-- `turns` by one whose rows are trajectories.
define('commit', function(run, a)
  local cfg, offers, freed = config(run), {}, {}
  local stage = stage_of(cfg, a.stage)
  local lease, total, ranges = held(run, stage, a.token, a.owner, a.rows)
  if band(a.mask, stage.makes) ~= a.mask then
    fail('BAD', 'stage ' .. stage.name .. ' writes columns that it does not declare as produced')
  end
  for _, parts in ipairs(ranges) do
    for _, part in ipairs(parts) do
      if band(part[3], a.mask) ~= 0 then fail('TWICE', 'row ' .. part[1] .. ' has one of these columns already') end
      if a.made and part[5] ~= LIVE then fail('TWICE', 'row ' .. part[1] .. ' is generated already') end
    end
  end
  local begun = stage.takes == 'groups' and call('EXISTS', run .. 'begun:' .. stage.origin) == 1
  if begun and a.made then check_progress(run, cfg, stage, a.rows, a.made) end
  if a.mask ~= 0 then
    check_width('refs', a.refs, 16, total)
    refer(run, a.worker, a.block, total, a.close)
  end
  if a.made then
    check_width('made', a.made, 8, total)
    count(run, 'generated', total)
    count(run, 'generated_tokens', sum_of(a.made, 8, 5, 0, total - 1))
    if a.turns then
      check_width('turns', a.turns, 4, total)
      count(run, 'generated_turns', sum_of(a.turns, 4, 1, 0, total - 1))
    end
  end
  local at = 0
  for r, parts in ipairs(ranges) do
    local from, n, states = a.rows[2 * r - 1], a.rows[2 * r] - a.rows[2 * r - 1] + 1, {}
    for i, part in ipairs(parts) do
      local state = a.made and GENERATED or part[5]
      states[i] = rep(pack('<I4I2I1I1', bor(part[3], a.mask), bor(part[4], stage.bit), state, 0), part[2] - part[1] + 1)
    end
    write(run, 's', 8, from, table.concat(states))
    if begun then
      local had = split(run .. 'begun:' .. stage.origin, from, from + n - 1)
      for i = 1, #had, 2 do let_go(run, { stage.producer }, had[i], had[i + 1], freed) end
      end_progress(run, stage, from, from + n - 1)
    end
    if a.mask ~= 0 then write(run, 'b' .. stage.producer, 16, from, sub(a.refs, 16 * at + 1, 16 * (at + n))) end
    if a.made then write(run, 'g', 8, from, sub(a.made, 8 * at + 1, 8 * (at + n))) end
    if a.made and a.turns then write(run, 'turns', 4, from, sub(a.turns, 4 * at + 1, 4 * (at + n))) end
    if a.mask ~= 0 then
      for _, part in ipairs(parts) do offer(run, cfg, part[1], part[2], part[3], bor(part[3], a.mask), offers) end
    end
    at = at + n
  end
  settle(run, a.token, lease, total)
  make_offers(run, cfg, a.home, offers)
  if stage.releases then
    for i = 1, #a.rows, 2 do
      local from, to = a.rows[i], a.rows[i + 1]
      local fixed, k, gone = read(run, 'f', 8, from, to), 0, {}
      while k <= to - from do
        local group, place, size = unpack_at('<I4I2I2', fixed, 8 * k + 1)
        local here = min(size - place, to - from + 1 - k)
        if here == size or call('HINCRBY', run .. 'gone:' .. stage.name, group, here) == size then
          if here ~= size then call('HDEL', run .. 'gone:' .. stage.name, group) end
          append(gone, group, group)
        end
        k = k + here
      end
      erase_rows(run, cfg, from, to, freed)
      for j = 1, #gone, 2 do
        cut(run .. 'open', gone[j], gone[j + 1])
        write(run, 'q', 8, gone[j], rep('\0', 8 * (gone[j + 1] - gone[j] + 1)))
        occupy(run, cfg, 'q', gone[j], gone[j + 1], -1, value(run, 'admitted') - 1)
      end
    end
  end
  wake_all(run, freed)
  return true
end)
