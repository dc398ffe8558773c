#!lua name=asyncdock

-- The index: where each sample's columns lie, what is ready for which stage, who holds it, which policy version made it.
-- Every function is one atomic step for a whole batch; arguments and replies are one msgpack value each.
--
--   admit ─▶ ready(stage) ─claim▶ leased ─commit▶ columns added ─▶ ready(next stage) … ─claim▶ trained ─▶ released
--                ▲                   │ expired, or its worker forgotten
--                └───────────────────┘ (delivered again, under a new token)
--
-- Keys of a run, all behind one hash tag, `asyncdock:{run}:`
--   config            the stages, P, S, W, η as msgpack, written once
--   n                 counters: admitted groups, published and trained versions, next ids, the ledger
--   rows              row id → record (below)          groups   group → {first row, rows, live?}
--   open              groups admitted and not yet consumed, by number
--   filtered          groups that left untrained while an older one was open
--   ready:STAGE       what can be claimed: row ids, or groups for stages that take whole groups
--   count:STAGE       group → rows that became ready (group stages)
--   due:STAGE         token → deadline in ms           held:TOKEN   the rows of a lease
--   worker:NAME       'STAGE TOKEN' of its leases      steps    step → groups trained in it, until released
--   blocks            block → {warehouse, offset, bytes, owner}    refs   block → rows that point to it
--   pending:WORKER    blocks allocated and not yet committed
--   bysize:W, byaddr:W   free extents of warehouse W: offset scored by size and by address (best fit, coalesced)
--   wake:TOPIC        a stream of one entry, read with BLOCK: a stage's name, `room:W`, `version`, `state`
--   reply:ID          what a call answered, for the client that has to ask again after a lost connection

local configs = {}  -- config by run, decoded; a cache of what never changes

local GEN, GROUP, PLACE, MASK, OFFERED, DONE, OLDEST, TOKENS, STATE, BLOCKS = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local LIVE, GENERATED, TRAINED, FILTERED = 0, 1, 2, 3

local function call(...) return redis.call(...) end
local function int(text) return tonumber(text or 0) or 0 end
local function fail(code, text) error(code .. ' ' .. text, 0) end

local function now()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function config(run)
  if not configs[run] then
    local packed = call('GET', run .. 'config')
    if not packed then fail('NORUN', 'run is not in this index') end
    configs[run] = cmsgpack.unpack(packed)
  end
  return configs[run]
end

local function count(run, field, by) return call('HINCRBY', run .. 'n', field, by) end
local function value(run, field) return int(call('HGET', run .. 'n', field)) end
local function wake(run, topic) call('XADD', run .. 'wake:' .. topic, 'MAXLEN', 1, '*', 'x', 1) end
local function woken(run, topic)
  local last = call('XREVRANGE', run .. 'wake:' .. topic, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

local function stage_of(cfg, name)
  for _, stage in ipairs(cfg.stages) do
    if stage.name == name then return stage end
  end
  fail('BAD', 'stage ' .. name .. ' is not declared')
end

local function load_rows(run, ids)
  local rows, from = {}, 1
  while from <= #ids do  -- unpack() takes a bounded number of values
    local last = math.min(from + 999, #ids)
    local found = call('HMGET', run .. 'rows', unpack(ids, from, last))
    for i = 1, last - from + 1 do rows[from + i - 1] = found[i] and cmsgpack.unpack(found[i]) or false end
    from = last + 1
  end
  return rows
end

local function save_rows(run, ids, rows)
  local args, n = {}, 0
  for i, id in ipairs(ids) do
    args[n + 1], args[n + 2], n = id, cmsgpack.pack(rows[i]), n + 2
    if n == 2000 or i == #ids then
      call('HSET', run .. 'rows', unpack(args, 1, n))
      n = 0
    end
  end
end

local function group_of(run, seq)
  local packed = call('HGET', run .. 'groups', seq)
  return packed and cmsgpack.unpack(packed)
end

-- Tell every stage whose columns are now complete in this row; `touched` collects the stages to wake.
local function offer(run, cfg, id, row, touched)
  for _, stage in ipairs(cfg.stages) do
    if bit.band(row[MASK], stage.needs) == stage.needs and bit.band(row[OFFERED], stage.bit) == 0 then
      row[OFFERED] = bit.bor(row[OFFERED], stage.bit)
      if stage.takes == 'rows' then
        call('ZADD', run .. 'ready:' .. stage.name, id, id)
        touched[stage.name] = true
      else
        local complete = call('HINCRBY', run .. 'count:' .. stage.name, row[GROUP], 1)
        if complete == group_of(run, row[GROUP])[2] then
          call('ZADD', run .. 'ready:' .. stage.name, row[GROUP], row[GROUP])
          touched[stage.name] = true
        end
      end
    end
  end
end

local function wake_all(run, touched)
  for name in pairs(touched) do wake(run, name) end
end

-- Groups that a stage at policy version v may touch lie below this number (design: admitted < (v + S + 1)·P). A filtered
-- group makes room for another, but only for one behind it: a slow engine must not count those that left ahead of it.
local function gate(run, cfg, version)
  local base, ahead = (version + cfg.slack + 1) * cfg.groups_per_step + value(run, 'filtered_groups'), 0
  while true do
    local limit = base - ahead
    ahead = call('ZCOUNT', run .. 'filtered', limit, '+inf')
    if base - ahead == limit then return limit end
  end
end

-- ── Room: best fit by size, neighbours joined on return ───────────────────────────────────────────────────────────────
local function give_back(run, block)
  local place = cmsgpack.unpack(call('HGET', run .. 'blocks', block))
  local warehouse, offset, size = place[1], place[2], place[3]
  local sizes, addresses = run .. 'bysize:' .. warehouse, run .. 'byaddr:' .. warehouse
  local following = call('ZSCORE', sizes, offset + size)
  if following then
    call('ZREM', sizes, offset + size)
    call('ZREM', addresses, offset + size)
    size = size + following
  end
  local before = call('ZREVRANGEBYSCORE', addresses, offset, '-inf', 'LIMIT', 0, 1)[1]
  if before then
    local length = int(call('ZSCORE', sizes, before))
    if before + length == offset then
      call('ZREM', addresses, before)
      call('ZREM', sizes, before)
      offset, size = int(before), length + size
    end
  end
  call('ZADD', sizes, size, string.format('%d', offset))
  call('ZADD', addresses, offset, string.format('%d', offset))
  call('HDEL', run .. 'blocks', block)
  call('HDEL', run .. 'refs', block)
  call('HINCRBY', run .. 'n', 'used:' .. warehouse, -place[3])
  return warehouse
end

local function unreference(run, blocks, freed)
  for i = 1, #blocks, 2 do
    if call('HINCRBY', run .. 'refs', blocks[i], -1) == 0 then freed['room:' .. give_back(run, blocks[i])] = true end
  end
end

-- A block that its writer has filled: no longer pending, pointed to by `rows` rows.
local function adopt(run, worker, block, rows)
  if call('SREM', run .. 'pending:' .. worker, block) == 0 then
    fail('LOST', 'block ' .. block .. ' was taken back: its worker was declared dead; write the rows again')
  end
  call('HINCRBY', run .. 'refs', block, rows)
end

-- ── Leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
local function drop_lease(run, stage, token, worker)
  call('ZREM', run .. 'due:' .. stage, token)
  call('DEL', run .. 'held:' .. token)
  call('HDEL', run .. 'owner', token)
  if worker then call('SREM', run .. 'worker:' .. worker, stage .. ' ' .. token) end
end

-- Rows of a lost lease can be claimed again.
local function expire(run, stage, token)
  local worker = call('HGET', run .. 'owner', token)
  local ids = call('SMEMBERS', run .. 'held:' .. token)
  local rows, back = load_rows(run, ids), 0
  for i, id in ipairs(ids) do
    if rows[i] then  -- not filtered meanwhile by another stage
      local member = stage.takes == 'rows' and id or rows[i][GROUP]
      call('ZADD', run .. 'ready:' .. stage.name, member, member)
      back = back + 1
    end
  end
  drop_lease(run, stage.name, token, worker)
  if back > 0 then
    count(run, 'redelivered', back)
    wake(run, stage.name)
  end
end

local function reap(run, stage, t)
  for _, token in ipairs(call('ZRANGEBYSCORE', run .. 'due:' .. stage.name, '-inf', t)) do expire(run, stage, token) end
end

local function describe(run, ids, rows)
  local out, blocks, seen = {}, {}, {}
  for i, id in ipairs(ids) do
    local row = rows[i]
    out[i] = { int(id), row[GEN], row[GROUP], row[PLACE], row[OLDEST], row[TOKENS], row[BLOCKS] }
    for j = 1, #row[BLOCKS], 2 do
      local block = row[BLOCKS][j]
      if not seen[block] then
        seen[block] = true
        local place = cmsgpack.unpack(call('HGET', run .. 'blocks', block))
        blocks[#blocks + 1] = { block, place[1], place[2], place[3] }
      end
    end
  end
  return out, blocks
end

-- The groups that the update may take now: P of them in order, allowed past a straggler only inside the window W that is
-- anchored at the oldest group left behind.
local function pick_window(run, cfg, stage)
  local picked, anchor = {}, nil
  for _, seq in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    if call('ZSCORE', run .. 'ready:' .. stage.name, seq) then
      if anchor and int(seq) >= anchor + cfg.window then break end
      picked[#picked + 1] = seq
      if #picked == cfg.groups_per_step then return picked end
    elseif not anchor then
      anchor = int(seq)
    end
  end
  return {}
end

-- ── The functions ─────────────────────────────────────────────────────────────────────────────────────────────────────
local function define(name, body)
  redis.register_function('asyncdock_' .. name, function(keys, args)
    local run, id = keys[1], args[2]
    if args[3] == '1' then
      local reply = call('GET', run .. 'reply:' .. id)
      if reply then return reply end
    end
    local ok, result = pcall(body, run, cmsgpack.unpack(args[1]))
    if not ok then
      local text = type(result) == 'table' and result.err or tostring(result)
      return redis.error_reply(text:match('^%u+ ') and text or 'INTERNAL ' .. name .. ': ' .. text)
    end
    local reply = cmsgpack.pack(result)
    call('SET', run .. 'reply:' .. id, reply, 'EX', 120)
    return reply
  end)
end

-- {config, counters, remake} → true when the run is new. A second call leaves everything as it is. A resumed run brings
-- the counters of its checkpoint, and the groups below `admitted` that it has not trained.
define('init', function(run, a)
  if call('SETNX', run .. 'config', cmsgpack.pack(a.config)) == 0 then return false end
  configs[run] = nil
  for field, number in pairs(a.counters) do call('HSET', run .. 'n', field, number) end
  for _, seq in ipairs(a.remake) do call('SADD', run .. 'remake', seq) end
  return true
end)

-- {warehouse, bytes}: a warehouse joins with all of its bytes free; joining again changes nothing.
define('join', function(run, a)
  if call('HSETNX', run .. 'n', 'capacity:' .. a.warehouse, a.bytes) == 1 then
    call('ZADD', run .. 'bysize:' .. a.warehouse, a.bytes, '0')
    call('ZADD', run .. 'byaddr:' .. a.warehouse, 0, '0')
  end
  return value(run, 'capacity:' .. a.warehouse)
end)

-- {warehouse, worker, bytes, reserve} → {block, offset}, or {wait = id} when there is no room now. `reserve` bytes are left
-- to the stages further on, so that a source cannot fill the room that its samples need to get out.
define('allocate', function(run, a)
  local size, capacity = math.ceil(a.bytes / 64) * 64, value(run, 'capacity:' .. a.warehouse)
  if size > capacity - a.reserve then
    fail('NOFIT', 'a block of ' .. size .. ' bytes can never fit into warehouse ' .. a.warehouse .. ': it has '
      .. (capacity - a.reserve) .. ' bytes for it; write fewer rows at once or give it more')
  end
  local sizes = run .. 'bysize:' .. a.warehouse
  local offset = call('ZRANGEBYSCORE', sizes, size, '+inf', 'LIMIT', 0, 1)[1]
  if not offset or value(run, 'used:' .. a.warehouse) + size > capacity - a.reserve then
    return { wait = woken(run, 'room:' .. a.warehouse) }
  end
  local left = int(call('ZSCORE', sizes, offset)) - size
  call('ZREM', sizes, offset)
  call('ZREM', run .. 'byaddr:' .. a.warehouse, offset)
  if left > 0 then
    local rest = string.format('%d', offset + size)
    call('ZADD', sizes, left, rest)
    call('ZADD', run .. 'byaddr:' .. a.warehouse, rest, rest)
  end
  local block = count(run, 'blocks', 1)
  call('HSET', run .. 'blocks', block, cmsgpack.pack({ a.warehouse, int(offset), size }))
  call('SADD', run .. 'pending:' .. a.worker, block)
  count(run, 'used:' .. a.warehouse, size)
  return { block = block, offset = int(offset) }
end)

-- {worker, blocks}: blocks that their writer gives up.
define('give_up', function(run, a)
  local freed = {}
  for _, block in ipairs(a.blocks) do
    if call('SREM', run .. 'pending:' .. a.worker, block) == 1 then freed['room:' .. give_back(run, block)] = true end
  end
  wake_all(run, freed)
  return true
end)

-- How many groups may be admitted now: {admitted, gate, remake = lost groups to be made again, wait}.
define('room_at_gate', function(run, a)
  local cfg = config(run)
  return {
    admitted = value(run, 'admitted'), gate = gate(run, cfg, value(run, 'published')),
    remake = call('SMEMBERS', run .. 'remake'), filtered = value(run, 'filtered_groups'),
    published = value(run, 'published'), trained = value(run, 'trained'), wait = woken(run, 'version'),
  }
end)

-- {worker, block, mask, groups = {{seq, rows, slot}…}}: groups enter, new ones in order, or lost ones again.
define('admit', function(run, a)
  local cfg, touched = config(run), {}
  local next_group, limit = value(run, 'admitted'), gate(run, cfg, value(run, 'published'))
  local total = 0
  for _, g in ipairs(a.groups) do
    local seq = g[1]
    if call('SISMEMBER', run .. 'remake', seq) == 0 then
      if seq ~= next_group then fail('BAD', 'group ' .. seq .. ' is out of order: the next one is ' .. next_group) end
      if seq >= limit then fail('GATE', 'group ' .. seq .. ' is past the gate, which stands at ' .. limit) end
      next_group = next_group + 1
    end
    total = total + g[2]
  end
  adopt(run, a.worker, a.block, total)
  for _, g in ipairs(a.groups) do
    local seq, n, slot = g[1], g[2], g[3]
    local known = group_of(run, seq)
    local first = known and known[1] or count(run, 'rows', n) - n
    local generation = known and known[3] + 1 or 1
    call('HSET', run .. 'groups', seq, cmsgpack.pack({ first, n, generation }))
    call('ZADD', run .. 'open', seq, seq)
    call('SREM', run .. 'remake', seq)
    local ids, rows = {}, {}
    for place = 0, n - 1 do
      ids[place + 1] = first + place
      rows[place + 1] = { generation, seq, place, a.mask, 0, 0, -1, 0, LIVE, { a.block, slot } }
      offer(run, cfg, first + place, rows[place + 1], touched)
    end
    save_rows(run, ids, rows)
  end
  call('HSET', run .. 'n', 'admitted', next_group)
  wake_all(run, touched)
  return next_group
end)

-- {stage, worker, most, lease, version} → {token, rows, blocks}, or {wait, due = ms until the next lease expires}.
-- `most` counts rows or groups as the stage takes them. A stage that generates gives the policy version it has loaded, and
-- gets no group that this version may not touch.
define('claim', function(run, a)
  local cfg, t = config(run), now()
  local stage = stage_of(cfg, a.stage)
  reap(run, stage, t)
  local ready = run .. 'ready:' .. stage.name
  local members
  if stage.takes == 'batch' then
    members = pick_window(run, cfg, stage)
  elseif a.version then
    members = call('ZRANGEBYSCORE', ready, '-inf', '(' .. gate(run, cfg, a.version), 'LIMIT', 0, a.most)
  else
    members = call('ZRANGE', ready, 0, a.most - 1)
  end
  if #members == 0 then
    local due = call('ZRANGE', run .. 'due:' .. stage.name, 0, 0, 'WITHSCORES')
    return { wait = woken(run, stage.name), due = due[2] and math.max(1, due[2] - t + 1) or false }
  end
  local ids = members
  if stage.takes ~= 'rows' then
    ids = {}
    for _, seq in ipairs(members) do
      local g = group_of(run, seq)
      for id = g[1], g[1] + g[2] - 1 do ids[#ids + 1] = id end
    end
  end
  local rows, kept, kept_rows, trained = load_rows(run, ids), {}, {}, value(run, 'trained')
  for i, id in ipairs(ids) do
    local row = rows[i]
    if row and bit.band(row[DONE], stage.bit) == 0 then
      if stage.takes == 'batch' and trained - row[OLDEST] > cfg.staleness then
        fail('STALE', 'row ' .. id .. ' was made by version ' .. row[OLDEST] .. ' and would be trained at version '
          .. trained .. ': more than the bound ' .. cfg.staleness)
      end
      kept[#kept + 1], kept_rows[#kept_rows + 1] = id, row
    end
  end
  for i = 1, #members, 1000 do call('ZREM', ready, unpack(members, i, math.min(i + 999, #members))) end
  local token = count(run, 'token', 1)
  for i = 1, #kept, 1000 do call('SADD', run .. 'held:' .. token, unpack(kept, i, math.min(i + 999, #kept))) end
  call('ZADD', run .. 'due:' .. stage.name, t + a.lease, token)
  call('HSET', run .. 'owner', token, a.worker)
  call('SADD', run .. 'worker:' .. a.worker, stage.name .. ' ' .. token)
  local out, blocks = describe(run, kept, kept_rows)
  return { token = token, rows = out, blocks = blocks }
end)

-- {stage, tokens, lease} → the tokens that still hold.
define('renew', function(run, a)
  local t, kept = now(), {}
  for _, token in ipairs(a.tokens) do
    if call('ZSCORE', run .. 'due:' .. a.stage, token) then
      call('ZADD', run .. 'due:' .. a.stage, t + a.lease, token)
      kept[#kept + 1] = token
    end
  end
  return kept
end)

-- Checks that all of `items` ({row, generation, …}) are held under `token`, and loads them.
local function held(run, stage, token, items)
  local ids, seen = {}, {}
  for i, item in ipairs(items) do
    ids[i] = item[1]
    if seen[item[1]] then fail('TWICE', 'row ' .. item[1] .. ' is given twice in one call; give each row once') end
    seen[item[1]] = true
  end
  local rows = load_rows(run, ids)
  for i, item in ipairs(items) do
    if not rows[i] or rows[i][GEN] ~= item[2] then
      fail('GONE', 'row ' .. item[1] .. ' generation ' .. item[2] .. ' was released; this handle is stale')
    end
    if call('SISMEMBER', run .. 'held:' .. token, item[1]) == 0 then
      fail('LEASE', 'row ' .. item[1] .. ' is no longer held by token ' .. token .. ' of stage ' .. stage.name
        .. ': the lease expired, or the row is committed already')
    end
  end
  return ids, rows
end

local function settle(run, stage, token, ids)
  for i = 1, #ids, 1000 do call('SREM', run .. 'held:' .. token, unpack(ids, i, math.min(i + 999, #ids))) end
  if call('EXISTS', run .. 'held:' .. token) == 0 then
    drop_lease(run, stage.name, token, call('HGET', run .. 'owner', token))
  end
end

-- {stage, worker, token, block?, mask, rows = {{row, generation, slot, oldest?, tokens?}…}}: outputs written, lease released.
define('commit', function(run, a)
  local cfg, touched = config(run), {}
  local stage = stage_of(cfg, a.stage)
  local ids, rows = held(run, stage, a.token, a.rows)
  if bit.band(a.mask, stage.makes) ~= a.mask then
    fail('BAD', 'stage ' .. stage.name .. ' writes columns that it does not declare as produced')
  end
  for i, row in ipairs(rows) do
    if bit.band(row[MASK], a.mask) ~= 0 then fail('TWICE', 'row ' .. ids[i] .. ' has one of these columns already') end
  end
  if a.mask ~= 0 then adopt(run, a.worker, a.block, #rows) end
  local made, tokens = 0, 0
  for i, row in ipairs(rows) do
    local item = a.rows[i]
    row[MASK], row[DONE] = bit.bor(row[MASK], a.mask), bit.bor(row[DONE], stage.bit)
    if a.mask ~= 0 then
      row[BLOCKS][#row[BLOCKS] + 1] = a.block
      row[BLOCKS][#row[BLOCKS] + 1] = item[3]
    end
    if item[4] then
      row[OLDEST], row[TOKENS], row[STATE] = item[4], item[5], GENERATED
      made, tokens = made + 1, tokens + item[5]
    end
    offer(run, cfg, ids[i], row, touched)
  end
  save_rows(run, ids, rows)
  if made > 0 then
    count(run, 'generated', made)
    count(run, 'generated_tokens', tokens)
  end
  settle(run, stage, a.token, ids)
  wake_all(run, touched)
  return true
end)

local function tally(run, rows, state, name)
  local made, tokens = 0, 0
  for _, row in ipairs(rows) do
    if row[STATE] == GENERATED then made = made + 1 end  -- a prompt that leaves without a response was never counted
    row[STATE], tokens = state, tokens + row[TOKENS]
  end
  count(run, name, made)
  count(run, name .. '_tokens', tokens)
end

-- {stage, token, step, rows, event?}: an optimizer step was made of these rows; the trainer is at version step + 1.
define('train', function(run, a)
  local cfg = config(run)
  local stage = stage_of(cfg, a.stage)
  local trained = value(run, 'trained')
  if a.step ~= trained then fail('BAD', 'step ' .. a.step .. ' is not next: the trainer is at version ' .. trained) end
  local ids, rows = held(run, stage, a.token, a.rows)
  local seqs, seen = {}, {}
  for i, row in ipairs(rows) do
    if trained - row[OLDEST] > cfg.staleness then
      fail('STALE', 'row ' .. ids[i] .. ' of version ' .. row[OLDEST] .. ' at version ' .. trained .. ': the bound is ' .. cfg.staleness)
    end
    if row[STATE] ~= GENERATED then fail('TWICE', 'row ' .. ids[i] .. ' was trained or filtered before') end
    row[DONE] = bit.bor(row[DONE], stage.bit)
    if not seen[row[GROUP]] then
      seen[row[GROUP]] = true
      seqs[#seqs + 1] = row[GROUP]
    end
  end
  tally(run, rows, TRAINED, 'trained_rows')
  save_rows(run, ids, rows)
  for _, seq in ipairs(seqs) do call('ZREM', run .. 'open', seq) end
  call('HSET', run .. 'steps', a.step, cmsgpack.pack(seqs))
  call('HSET', run .. 'n', 'trained', a.step + 1)
  if a.event then
    call('XADD', run .. 'events', 'MAXLEN', '~', 100000, '*', 'kind', 'step', 'time', a.event.time, 'data', a.event.data)
  end
  settle(run, stage, a.token, ids)
  return a.step + 1
end)

local function rows_of(run, seqs)
  local ids = {}
  for _, seq in ipairs(seqs) do
    local g = group_of(run, seq)
    if g then
      for id = g[1], g[1] + g[2] - 1 do ids[#ids + 1] = id end
    end
  end
  return ids, load_rows(run, ids)
end

-- {step} → {rows, blocks} that the step was made of, for a trainer that comes back and replays it.
define('replay', function(run, a)
  local packed = call('HGET', run .. 'steps', a.step)
  if not packed then fail('GONE', 'step ' .. a.step .. ' was released: a checkpoint covers it; resume from that') end
  local out, blocks = describe(run, rows_of(run, cmsgpack.unpack(packed)))
  return { rows = out, blocks = blocks }
end)

-- Forgets groups: their records, their places in every queue, their bytes.
local function erase(run, cfg, seqs, freed)
  local ids, rows = rows_of(run, seqs)
  for i, row in ipairs(rows) do
    if row then unreference(run, row[BLOCKS], freed) end
    call('HDEL', run .. 'rows', ids[i])
  end
  for _, stage in ipairs(cfg.stages) do
    if stage.takes == 'rows' then
      for _, id in ipairs(ids) do call('ZREM', run .. 'ready:' .. stage.name, id) end
    else
      for _, seq in ipairs(seqs) do
        call('ZREM', run .. 'ready:' .. stage.name, seq)
        call('HDEL', run .. 'count:' .. stage.name, seq)
      end
    end
  end
end

-- {before}: a checkpoint covers the steps below `before`; their rows are released and their bytes reused.
define('release', function(run, a)
  local cfg, freed, released = config(run), {}, 0
  for _, step in ipairs(call('HKEYS', run .. 'steps')) do
    if int(step) < a.before then
      local seqs = cmsgpack.unpack(call('HGET', run .. 'steps', step))
      erase(run, cfg, seqs, freed)
      for _, seq in ipairs(seqs) do call('HDEL', run .. 'groups', seq) end
      call('HDEL', run .. 'steps', step)
      released = released + #seqs
    end
  end
  wake_all(run, freed)
  return released
end)

-- {stage, token, groups}: whole groups, held under `token` by a stage that takes groups, leave without being trained.
define('filter', function(run, a)
  local cfg, freed, touched = config(run), {}, {}
  local stage = stage_of(cfg, a.stage)
  local ids, rows = rows_of(run, a.groups)
  local items = {}
  for i, id in ipairs(ids) do items[i] = { id, rows[i] and rows[i][GEN] or 0 } end
  held(run, stage, a.token, items)
  tally(run, rows, FILTERED, 'filtered_rows')
  settle(run, stage, a.token, ids)
  erase(run, cfg, a.groups, freed)
  for _, seq in ipairs(a.groups) do
    call('ZREM', run .. 'open', seq)
    call('HDEL', run .. 'groups', seq)
    call('ZADD', run .. 'filtered', seq, seq)
  end
  local oldest = call('ZRANGE', run .. 'open', 0, 0)[1]
  call('ZREMRANGEBYSCORE', run .. 'filtered', '-inf', oldest and '(' .. oldest or '+inf')
  count(run, 'filtered_groups', #a.groups)
  wake_all(run, freed)
  for _, s in ipairs(cfg.stages) do touched[s.name] = true end
  wake_all(run, touched)
  wake(run, 'version')
  return true
end)

-- {version, record}: weights of `version` lie in host memory. The gate opens, generation may go on.
define('publish', function(run, a)
  local cfg = config(run)
  local trained, published = value(run, 'trained'), value(run, 'published')
  if a.version ~= trained then
    fail('BAD', 'version ' .. a.version .. ' cannot be published: the trainer is at version ' .. trained)
  end
  if a.version < published then fail('BAD', 'version ' .. a.version .. ' is older than the published ' .. published) end
  call('HSET', run .. 'n', 'published', a.version)
  call('SET', run .. 'weights', cmsgpack.pack(a.record))
  wake(run, 'version')
  for _, stage in ipairs(cfg.stages) do wake(run, stage.name) end
  return true
end)

-- → {version, record?, wait}
define('published', function(run, a)
  local record = call('GET', run .. 'weights')
  return { version = value(run, 'published'), record = record and cmsgpack.unpack(record) or false, wait = woken(run, 'version') }
end)

-- {worker}: it is dead. Its leases end now and its unfinished blocks are taken back.
define('forget', function(run, a)
  local cfg, freed = config(run), {}
  for _, entry in ipairs(call('SMEMBERS', run .. 'worker:' .. a.worker)) do
    local name, token = entry:match('^(%S+) (%S+)$')
    expire(run, stage_of(cfg, name), token)
  end
  for _, block in ipairs(call('SMEMBERS', run .. 'pending:' .. a.worker)) do
    freed['room:' .. give_back(run, block)] = true
  end
  call('DEL', run .. 'pending:' .. a.worker)
  call('DEL', run .. 'worker:' .. a.worker)
  wake_all(run, freed)
  return true
end)

-- → {state, reason, wait}
define('state', function(run, a)
  local found = call('HMGET', run .. 'state', 'state', 'reason')
  return { found[1] or '', found[2] or '', woken(run, 'state') }
end)

-- {topic}: wake whoever waits on it
define('nudge', function(run, a)
  wake(run, a.topic)
  return true
end)

-- {stage} → how many rows or groups wait to be claimed
define('depth', function(run, a)
  return call('ZCARD', run .. 'ready:' .. a.stage)
end)

-- The ledger. `in_flight` is counted row by row over the open groups, not derived from the other counters.
define('ledger', function(run, a)
  local rows_in_flight, tokens_in_flight = 0, 0
  local _, rows = rows_of(run, call('ZRANGE', run .. 'open', 0, -1))
  for _, row in ipairs(rows) do
    if row and row[STATE] == GENERATED then
      rows_in_flight, tokens_in_flight = rows_in_flight + 1, tokens_in_flight + row[TOKENS]
    end
  end
  return {
    generated = value(run, 'generated'), generated_tokens = value(run, 'generated_tokens'),
    trained = value(run, 'trained_rows'), trained_tokens = value(run, 'trained_rows_tokens'),
    filtered = value(run, 'filtered_rows'), filtered_tokens = value(run, 'filtered_rows_tokens'),
    in_flight = rows_in_flight, in_flight_tokens = tokens_in_flight,
    redelivered = value(run, 'redelivered'),
  }
end)

-- → {counters, remake}: what a run that resumes at the trainer's version starts from. Groups admitted and not trained are
-- made again; their responses leave the ledger, as they will be generated anew.
define('snapshot', function(run, a)
  local trained = value(run, 'trained')
  local remake, highest = call('ZRANGE', run .. 'open', 0, -1), value(run, 'admitted')
  for _, seq in ipairs(call('SMEMBERS', run .. 'remake')) do remake[#remake + 1] = seq end
  for i, seq in ipairs(remake) do remake[i] = int(seq) end
  return {
    counters = {
      published = trained, trained = trained, admitted = highest,
      generated = value(run, 'trained_rows') + value(run, 'filtered_rows'),
      generated_tokens = value(run, 'trained_rows_tokens') + value(run, 'filtered_rows_tokens'),
      trained_rows = value(run, 'trained_rows'), trained_rows_tokens = value(run, 'trained_rows_tokens'),
      filtered_rows = value(run, 'filtered_rows'), filtered_rows_tokens = value(run, 'filtered_rows_tokens'),
      filtered_groups = value(run, 'filtered_groups'),
    },
    remake = remake,
  }
end)

-- {ready = {stage → queue depth}, leased, used and capacity by warehouse, …}
define('stats', function(run, a)
  local cfg, t = config(run), now()
  local out = {
    admitted = value(run, 'admitted'), published = value(run, 'published'), trained = value(run, 'trained'),
    gate = gate(run, cfg, value(run, 'published')), open = call('ZCARD', run .. 'open'),
    rows = call('HLEN', run .. 'rows'), blocks = call('HLEN', run .. 'blocks'), stages = {}, warehouses = {},
  }
  for _, stage in ipairs(cfg.stages) do
    reap(run, stage, t)
    local leased = 0
    for _, token in ipairs(call('ZRANGE', run .. 'due:' .. stage.name, 0, -1)) do
      leased = leased + call('SCARD', run .. 'held:' .. token)
    end
    out.stages[stage.name] = { ready = call('ZCARD', run .. 'ready:' .. stage.name), leased = leased, takes = stage.takes }
  end
  local counters = call('HGETALL', run .. 'n')
  for i = 1, #counters, 2 do
    local warehouse = counters[i]:match('^capacity:(.+)$')
    if warehouse then
      out.warehouses[warehouse] = { capacity = int(counters[i + 1]), used = value(run, 'used:' .. warehouse) }
    end
  end
  return out
end)

-- {from = {state…}, to, reason} → {state, changed}. The run's state moves only along what `from` allows.
define('transition', function(run, a)
  local state = call('HGET', run .. 'state', 'state') or ''
  for _, allowed in ipairs(a.from) do
    if state == allowed then
      call('HSET', run .. 'state', 'state', a.to, 'reason', a.reason, 'since', now())
      wake(run, 'state')
      return { state = a.to, changed = true }
    end
  end
  return { state = state, changed = false }
end)
