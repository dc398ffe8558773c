#!lua name=asyncdock

-- The index: where each sample's columns lie, what is ready for which stage, who holds it, which policy version made it.
-- Every function is one atomic step for a whole batch; arguments and replies are one msgpack value each.
--
--   admit ─▶ ready(stage) ─claim▶ leased ─commit▶ columns added ─▶ ready(next stage) … ─claim▶ trained ─▶ released
--                ▲                   │ expired, or its worker forgotten
--                └───────────────────┘ (delivered again, under a new token)
--
-- A stage that takes groups may put a row aside with what it has made so far, and any of its workers goes on with it:
--
--   leased ─park▶ parked(stage) ─claim▶ leased ─park▶ … ─commit▶     a lost lease: back to parked, with the last parked progress
--
-- What is known of rows lies in arrays, cut into segments of 4096 rows; what is ready, open or leased is a set of number
-- ranges. A batch of rows in the same condition is then read, compared and written as one string each, so a batch of 256
-- costs little more than one row. Row numbers are never used again: a number is its own generation.
--
-- Keys of a run, all behind one hash tag, `asyncdock:{run}:`
--   config            the stages, P, S, W, η as msgpack, written once
--   n                 counters: admitted groups, published and trained versions, next ids, queue depths, the ledger
--   s:SEG             rows' state: columns u32, stages done u16, condition u8 (0: not there), 0
--   f:SEG             rows' group u32, place in it u16, samples of the group u16
--   g:SEG             rows' oldest version i32, tokens u32
--   b0:SEG b1:SEG …   where the columns lie that admission (0) or a producing stage wrote: block u32, slot u32, offset u48,
--                     warehouse u16
--   q:SEG             groups' first row u48, samples u16
--   live:FIELD        segment → rows (s) or groups (q) that are there
--   open              groups admitted and not yet consumed
--   remake            groups that were lost and must be admitted again
--   filtered          groups that left untrained while an older one was open
--   ready:STAGE:HOME  what can be claimed: rows, or groups for stages that take whole groups, by the warehouse of the commit
--                     that made them ready
--   count:STAGE       group → rows that became ready (group stages)
--   gone:STAGE        group → rows that a stage which releases rows has released
--   partial:STAGE     groups with rows that this stage has committed, or begun, while others were delivered again
--   begun:STAGE       rows with progress: parked at least once and not committed. b of the stage says where the progress lies
--                     (its columns are not set in s), g who made it and how many tokens it has
--   parked:STAGE      those of them that nobody holds: they are claimed first
--   leases            token → {stage, worker, row ranges, rows not committed, home, when it was claimed in ms, owner}. A token is
--                     128 random bits that the claimant made. Who shows one must be its owner: '' for the run's own workers
--   due:STAGE         token → deadline in ms
--   steps             step → groups trained in it, until released
--   blocks            block → {warehouse, offset, bytes, worker}   refs   block → rows that point to it, + 1 while it is open
--   open:WORKER       blocks that their worker still writes to
--   warehouses        number → {name, node, path, host, port, bytes, leaving}
--   bysize:W, byaddr:W   free extents of warehouse W: offset scored by size and by address (best fit, coalesced)
--   swapping          workers that swap their weights now, scored by deadline in ms
--   wake:TOPIC        a stream of one entry, read with BLOCK: a stage's name, alone or with `:HOME`, `room`, `version`,
--                     `state`, `swap`, `warehouses` (one has joined), `fed` (prompts came from outside), `feed` (room for more)
--   weights, records  what is told of the published version, and of the two newest by their number
--   replies:CLIENT    lane → what its last call answered, for a client that has to ask again after a lost connection
--
-- Sets of ranges are sorted sets of 'first-last' scored by first; ranges never touch.

local configs = {}  -- config by run, decoded; a cache of what never changes

local SEGMENT = 4096
local PRESENT = 10000  -- ms since a node's last claim for which it counts as one with workers
local LIVE, GENERATED, TRAINED = 1, 2, 3

-- The libraries are not there yet while this file is loaded; the first call binds them.
local rep, sub, floor, min, max, pack, unpack_at, band, bor
local function bind()
  if rep then return end
  rep, sub, floor, min, max = string.rep, string.sub, math.floor, math.min, math.max
  pack, unpack_at, band, bor = struct.pack, struct.unpack, bit.band, bit.bor
end

local function call(...) return redis.call(...) end
local function int(text) return tonumber(text or 0) or 0 end
local function fail(code, text) error(code .. ' ' .. text, 0) end

local function now()
  local t = call('TIME')
  return t[1] * 1000 + floor(t[2] / 1000)
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
-- A topic is woken only when a claim that waits on it has found nothing since the last time. Claims wait on their stage's, or
-- on that of their stage and home.
local function wake_idle(run, topic)
  if call('HGET', run .. 'n', 'idle:' .. topic) ~= '1' then return false end
  call('HSET', run .. 'n', 'idle:' .. topic, 0)
  wake(run, topic)
  return true
end
-- Wakes who waits for rows of a stage on any node; at time t, who has been told when to come again is left alone.
local function wake_stage(run, name, t)
  wake_idle(run, name)
  local last = value(run, 'warehouses')
  for home = 1, last > 1 and last or 0 do
    local place = name .. ':' .. home
    if not t or value(run, 'until:' .. place) <= t then wake_idle(run, place) end
  end
end
local function wake_all(run, topics) for topic in pairs(topics) do wake(run, topic) end end
-- An entry of the run's event stream, if there is anything to be told.
local function tell(run, kind, event)
  if not event then return end
  call('XADD', run .. 'events', 'MAXLEN', '~', 100000, '*', 'kind', kind, 'time', event.time, 'data', event.data)
end
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

-- ── Arrays in segments ────────────────────────────────────────────────────────────────────────────────────────────────
local function read(run, field, width, from, to)
  local out
  while from <= to do
    local segment = floor(from / SEGMENT)
    local last, base = min(to, segment * SEGMENT + SEGMENT - 1), segment * SEGMENT
    local want = (last - from + 1) * width
    local got = call('GETRANGE', run .. field .. ':' .. segment, (from - base) * width, (last - base + 1) * width - 1)
    if #got < want then got = got .. rep('\0', want - #got) end
    out = out and out .. got or got
    from = last + 1
  end
  return out
end

local function write(run, field, width, from, bytes)
  local at, to = 1, from + #bytes / width - 1
  while from <= to do
    local segment = floor(from / SEGMENT)
    local last = min(to, segment * SEGMENT + SEGMENT - 1)
    local size = (last - from + 1) * width
    call('SETRANGE', run .. field .. ':' .. segment, (from - segment * SEGMENT) * width, sub(bytes, at, at + size - 1))
    at, from = at + size, last + 1
  end
end

-- Values two by two as entries of format `unit`; a call for many costs little more than a call for one.
local function pack_pairs(unit, values)
  local out, n = {}, #values
  for from = 1, n, 512 do
    local to = min(n, from + 511)
    out[#out + 1] = pack('<' .. rep(unit, (to - from + 1) / 2), unpack(values, from, to))
  end
  return table.concat(out)
end

-- Entries from..to have come (by = 1) or gone (-1). A segment that nothing is left in is dropped once it is not the newest,
-- which holds entry `newest`.
local function occupy(run, cfg, field, from, to, by, newest)
  local first = floor(max(0, from - 1) / SEGMENT)  -- when entries come: the segment that was the newest
  while from <= to do
    local segment = floor(from / SEGMENT)
    local last = min(to, segment * SEGMENT + SEGMENT - 1)
    call('HINCRBY', run .. 'live:' .. field, segment, by * (last - from + 1))
    from = last + 1
  end
  for segment = first, min(floor(to / SEGMENT), floor(newest / SEGMENT) - 1) do
    if call('HGET', run .. 'live:' .. field, segment) == '0' then
      call('HDEL', run .. 'live:' .. field, segment)
      for _, name in ipairs(field == 's' and cfg.row_fields or { 'q' }) do call('UNLINK', run .. name .. ':' .. segment) end
    end
  end
end

-- visit(entry, i, j) for each stretch i..j (from 0) of equal 8-byte entries
local function stretches(bytes, visit)
  local n, i = #bytes / 8, 0
  local first = sub(bytes, 1, 8)
  if bytes == rep(first, n) then return visit(first, 0, n - 1) end
  while i < n do
    local entry, j = sub(bytes, 8 * i + 1, 8 * i + 8), i
    while j + 1 < n and sub(bytes, 8 * j + 9, 8 * j + 16) == entry do j = j + 1 end
    visit(entry, i, j)
    i = j + 1
  end
end

-- ── Sets of ranges ────────────────────────────────────────────────────────────────────────────────────────────────────
local function ends(member)
  local a, b = member:match('^(%d+)-(%d+)$')
  return tonumber(a), tonumber(b)
end

local function range(a, b) return string.format('%d-%d', a, b) end

local function add(key, a, b)
  local before = call('ZREVRANGEBYSCORE', key, a, '-inf', 'LIMIT', 0, 1)[1]
  if before then
    local c, d = ends(before)
    if d == a - 1 then
      call('ZREM', key, before)
      a = c
    end
  end
  local after = call('ZRANGEBYSCORE', key, b + 1, b + 1)[1]
  if after then
    call('ZREM', key, after)
    local _, d = ends(after)
    b = d
  end
  call('ZADD', key, a, range(a, b))
end

-- Takes a..b out; how many were in it.
local function cut(key, a, b)
  local gone = 0
  local function clip(member)
    local c, d = ends(member)
    if d < a then return end
    call('ZREM', key, member)
    if c < a then call('ZADD', key, c, range(c, a - 1)) end
    if d > b then call('ZADD', key, b + 1, range(b + 1, d)) end
    gone = gone + min(b, d) - max(a, c) + 1
  end
  local before = call('ZREVRANGEBYSCORE', key, '(' .. a, '-inf', 'LIMIT', 0, 1)[1]
  if before then clip(before) end
  for _, member in ipairs(call('ZRANGEBYSCORE', key, a, b)) do clip(member) end
  return gone
end

-- a..b as two flat lists: what of it is in the set, and what is not.
local function split(key, a, b)
  local inside, outside, at = {}, {}, a
  local found = call('ZREVRANGEBYSCORE', key, '(' .. a, '-inf', 'LIMIT', 0, 1)
  for _, member in ipairs(call('ZRANGEBYSCORE', key, a, b)) do found[#found + 1] = member end
  for _, member in ipairs(found) do
    local c, d = ends(member)
    c, d = max(a, c), min(b, d)
    if c <= d then
      if at < c then outside[#outside + 1], outside[#outside + 2] = at, c - 1 end
      inside[#inside + 1], inside[#inside + 2] = c, d
      at = d + 1
    end
  end
  if at <= b then outside[#outside + 1], outside[#outside + 2] = at, b end
  return inside, outside
end

-- Joins a..b to the last of a flat list {first, last, first, last, …} when it follows on it.
local function append(list, a, b)
  if #list > 0 and list[#list] == a - 1 then
    list[#list] = b
  else
    list[#list + 1], list[#list + 2] = a, b
  end
end

-- Where a stage's readiness is kept: by warehouse, so that near rows are found at once; train batches know no nearness.
local function homes(run, stage)
  if stage.takes == 'batch' then return { 0 } end
  local out = {}
  for home = 0, value(run, 'warehouses') do out[home + 1] = home end
  return out
end

-- Rows that become ready on a node where the stage has workers are theirs for a headstart: elsewhere they would cross the
-- network, often for nothing. Then, and where there are no workers, they are anybody's. `since` is when a home's rows began
-- to be its own; 0: they never were.
local function own(cfg, since, t) return since > 0 and t - since < (cfg.headstart or 0) end

local function make_ready(run, stage, home, list)
  if stage.takes == 'batch' then home = 0 end
  local key, total = run .. 'ready:' .. stage.name .. ':' .. home, 0
  local there = call('EXISTS', key) == 1
  for i = 1, #list, 2 do
    add(key, list[i], list[i + 1])
    total = total + list[i + 1] - list[i] + 1
  end
  if total == 0 then return end
  count(run, 'ready:' .. stage.name, total)
  if stage.takes == 'batch' or value(run, 'warehouses') < 2 then return wake_stage(run, stage.name) end
  local t, place = now(), stage.name .. ':' .. home
  local waits = wake_idle(run, place)
  if not there then
    local near = waits or t - value(run, 'seen:' .. place) < PRESENT
    call('HSET', run .. 'n', 'since:' .. place, near and t or 0)
  end
  if waits and own(config(run), value(run, 'since:' .. place), t) then
    wake_idle(run, stage.name)  -- its claim tells the others, if it leaves something
  else
    wake_stage(run, stage.name, t)
  end
end

local function not_ready(run, stage, a, b)
  if value(run, 'ready:' .. stage.name) == 0 then return end
  for _, home in ipairs(homes(run, stage)) do
    local gone = cut(run .. 'ready:' .. stage.name .. ':' .. home, a, b)
    if gone > 0 then count(run, 'ready:' .. stage.name, -gone) end
  end
end

-- ── Groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────
local function rows_of(run, group)
  local first, n = unpack_at('<I6I2', read(run, 'q', 8, group, group))
  return first, n  -- n is 0 when the group is not there
end

-- The rows of groups {first, last, …} as ranges, one after the other; groups that are not there are left out.
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

-- Tells every stage whose columns have become complete in rows from..to, which had the columns `before` and now have
-- `after`. `offers` collects, by stage, the ranges that can be claimed.
local function offer(run, cfg, from, to, before, after, offers)
  local fixed
  for _, stage in ipairs(cfg.stages) do
    if band(after, stage.needs) == stage.needs and band(before, stage.needs) ~= stage.needs then
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
local function free(run, block)
  local packed = call('HGET', run .. 'blocks', block)
  if not packed then return end
  local place = cmsgpack.unpack(packed)
  local warehouse, offset, size = place[1], place[2], place[3]
  call('HDEL', run .. 'blocks', block)
  call('HDEL', run .. 'refs', block)
  if call('HEXISTS', run .. 'n', 'used:' .. warehouse) == 0 then return end  -- the warehouse is gone
  count(run, 'used:' .. warehouse, -size)
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
end

local function unreference(run, block, rows, freed)
  if call('HINCRBY', run .. 'refs', block, -rows) <= 0 then
    free(run, block)
    freed.room = true
  end
end

-- Rows point to a block that its worker has written. `close`: it writes no more to it.
local function refer(run, worker, block, rows, close)
  if call('SISMEMBER', run .. 'open:' .. worker, block) == 0 then
    fail('LOST', 'block ' .. block .. ' was taken back: its worker was declared dead; write the rows again')
  end
  if close then
    call('SREM', run .. 'open:' .. worker, block)
    rows = rows - 1
  end
  if rows ~= 0 then call('HINCRBY', run .. 'refs', block, rows) end
end

-- Rows from..to point no more to what these producers wrote.
local function let_go(run, producers, from, to, freed)
  local blocks, n = {}, to - from + 1
  for _, producer in ipairs(producers) do
    local refs = read(run, 'b' .. producer, 16, from, to)
    if refs ~= rep('\0', 16 * n) then
      for i = 0, n - 1 do
        local block = unpack_at('<I4', refs, 16 * i + 1)
        if block > 0 then blocks[block] = (blocks[block] or 0) + 1 end
      end
      write(run, 'b' .. producer, 16, from, rep('\0', 16 * n))
    end
  end
  for block, rows in pairs(blocks) do unreference(run, block, rows, freed) end
end

-- Rows from..to have no progress any more. Only a stage that takes groups ever has some.
local function end_progress(run, stage, from, to)
  if stage.takes ~= 'groups' or call('EXISTS', run .. 'begun:' .. stage.name) == 0 then return end
  cut(run .. 'begun:' .. stage.name, from, to)
  local gone = cut(run .. 'parked:' .. stage.name, from, to)
  if gone > 0 then count(run, 'parked:' .. stage.name, -gone) end
end

-- Forgets rows: their state, their places in every queue, their bytes.
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

-- Forgets groups {first, last, …} with their rows.
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

-- ── Leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
local function lease_of(run, token)
  local packed = call('HGET', run .. 'leases', token)
  return packed and cmsgpack.unpack(packed)
end

-- The lease when `token` is one of `owner` (nil: the run's own workers). A foreign token is answered as an ended one is.
local function lease_of_owner(run, token, owner)
  local lease = lease_of(run, token)
  return lease and lease[7] == (owner or '') and lease
end

local function drop_lease(run, token, lease)
  call('ZREM', run .. 'due:' .. lease[1], token)
  call('HDEL', run .. 'leases', token)
  -- Who waits for what others might give back need wait no longer.
  if call('EXISTS', run .. 'due:' .. lease[1]) == 0 then wake_stage(run, lease[1]) end
end

local function settle(run, token, lease, n)
  lease[4] = lease[4] - n
  if lease[4] <= 0 then drop_lease(run, token, lease) else call('HSET', run .. 'leases', token, cmsgpack.pack(lease)) end
end

-- Rows wait, with what has been made of them, for whoever goes on with them.
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

-- Rows of a lost lease can be claimed again, those with progress one by one; those that were committed, or filtered by
-- another stage meanwhile, not.
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

local function reap(run, cfg, stage, t)
  for _, token in ipairs(call('ZRANGEBYSCORE', run .. 'due:' .. stage.name, '-inf', t)) do expire(run, cfg, token) end
end

-- What a worker has to know of rows {first, last, …}: parallel arrays, in this order. `reads` names the producers whose
-- places are told (all of them when not given); the others' are empty.
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

-- The groups that the update may take now: P of them in order, allowed past a straggler only inside the window W that is
-- anchored at the oldest group left behind. As ranges.
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

-- ── The functions ─────────────────────────────────────────────────────────────────────────────────────────────────────
-- A function that changes nothing is defined with `reads`: its answer need not be kept. One with `recall` keeps only what
-- the second result of its body says, and answers a repeated call from that.
local function define(name, body, reads, recall)
  redis.register_function('asyncdock_' .. name, function(keys, args)
    local run, request, replies, lane = keys[1], args[2], keys[1] .. 'replies:' .. args[4], args[5]
    bind()
    if args[3] == '1' and not reads then
      local known = call('HGET', replies, lane)
      if known and sub(known, 1, #request) == request then
        known = sub(known, #request + 1)
        return recall and cmsgpack.pack(recall(run, cmsgpack.unpack(known))) or known
      end
    end
    local ok, result, kept = pcall(body, run, cmsgpack.unpack(args[1]))
    if not ok then
      local text = type(result) == 'table' and result.err or tostring(result)
      return redis.error_reply(text:match('^%u+ ') and text or 'INTERNAL ' .. name .. ': ' .. text)
    end
    local reply = cmsgpack.pack(result)
    -- A client that is gone leaves nothing for ever.
    if not reads and call('HSET', replies, lane, request .. (kept and cmsgpack.pack(kept) or reply)) == 1 then
      call('EXPIRE', replies, 86400)
    end
    return reply
  end)
end

-- {config, counters, remake} → true when the run is new. A second call leaves everything as it is. A resumed run brings
-- the counters of its checkpoint, and the groups below `admitted` that it has not trained.
define('init', function(run, a)
  if call('SETNX', run .. 'config', cmsgpack.pack(a.config)) == 0 then return false end
  configs[run] = nil
  for field, number in pairs(a.counters) do call('HSET', run .. 'n', field, number) end
  for _, group in ipairs(a.remake) do
    call('SADD', run .. 'remake', group)
    add(run .. 'open', group, group)
  end
  return true
end)

define('config', function(run) return config(run) end, true)

-- {warehouse = name, node, path, bytes} → {number, bytes}: a warehouse joins with all of its bytes free; joining again changes nothing.
define('join', function(run, a)
  local number = call('HGET', run .. 'names', a.warehouse)
  if not number then
    number = count(run, 'warehouses', 1)
    call('HSET', run .. 'names', a.warehouse, number)
    call('HSET', run .. 'warehouses', number,
      cmsgpack.pack({ name = a.warehouse, node = a.node, path = a.path, bytes = a.bytes, host = '', port = 0, leaving = false }))
    call('HSET', run .. 'n', 'used:' .. number, 0)
    call('ZADD', run .. 'bysize:' .. number, a.bytes, '0')
    call('ZADD', run .. 'byaddr:' .. number, 0, '0')
    wake(run, 'warehouses')
  end
  local known = cmsgpack.unpack(call('HGET', run .. 'warehouses', number))
  return { number = int(number), bytes = known.bytes }
end)

local function change_warehouse(run, number, change)
  local packed = call('HGET', run .. 'warehouses', number)
  if not packed then fail('NOHOUSE', 'warehouse ' .. number .. ' is not in this run: it has left, or its node was lost') end
  local known = cmsgpack.unpack(packed)
  for field, new in pairs(change) do known[field] = new end
  call('HSET', run .. 'warehouses', number, cmsgpack.pack(known))
  return known
end

-- {warehouse, host, port}: where other nodes reach it; said again every few seconds, as a sign of life.
define('serve', function(run, a)
  change_warehouse(run, a.warehouse, { host = a.host, port = a.port, seen = now() })
  return true
end)

-- → number → {name, node, path, bytes, host, port, leaving}
define('warehouses', function(run, a)
  local out, found = {}, call('HGETALL', run .. 'warehouses')
  for i = 1, #found, 2 do out[found[i]] = cmsgpack.unpack(found[i + 1]) end
  return out
end, true)

-- {warehouse, worker, bytes, reserve, close} → {block, offset}, or {wait = id} when there is no room now. `reserve` bytes are
-- left to the stages further on, so that a source cannot fill the room that its samples need to get out. `close` are blocks
-- that the worker writes no more to.
define('allocate', function(run, a)
  local size, freed = math.ceil(a.bytes / 64) * 64, {}
  local known = call('HGET', run .. 'warehouses', a.warehouse)
  if not known then fail('NOHOUSE', 'warehouse ' .. a.warehouse .. ' is not in this run: it has left, or its node was lost') end
  known = cmsgpack.unpack(known)
  if known.leaving then fail('NOHOUSE', 'warehouse ' .. known.name .. ' is leaving the run; write to another one') end
  for _, block in ipairs(a.close) do
    if call('SREM', run .. 'open:' .. a.worker, block) == 1 then unreference(run, block, 1, freed) end
  end
  wake_all(run, freed)
  local room = known.bytes - a.reserve
  if size > room then
    fail('NOFIT', 'a block of ' .. size .. ' bytes can never fit into warehouse ' .. known.name .. ': it has '
      .. room .. ' bytes for it; write fewer rows at once or give it more')
  end
  local sizes = run .. 'bysize:' .. a.warehouse
  local offset = call('ZRANGEBYSCORE', sizes, size, '+inf', 'LIMIT', 0, 1)[1]
  if not offset or value(run, 'used:' .. a.warehouse) + size > room then return { wait = woken(run, 'room') } end
  local left = int(call('ZSCORE', sizes, offset)) - size
  call('ZREM', sizes, offset)
  call('ZREM', run .. 'byaddr:' .. a.warehouse, offset)
  if left > 0 then
    local rest = string.format('%d', offset + size)
    call('ZADD', sizes, left, rest)
    call('ZADD', run .. 'byaddr:' .. a.warehouse, rest, rest)
  end
  local block = count(run, 'blocks', 1)
  call('HSET', run .. 'blocks', block, cmsgpack.pack({ a.warehouse, int(offset), size, a.worker }))
  call('HSET', run .. 'refs', block, 1)
  call('SADD', run .. 'open:' .. a.worker, block)
  count(run, 'used:' .. a.warehouse, size)
  return { block = block, offset = int(offset) }
end)

-- {worker, blocks}: blocks that their worker writes no more to.
define('close', function(run, a)
  local freed = {}
  for _, block in ipairs(a.blocks) do
    if call('SREM', run .. 'open:' .. a.worker, block) == 1 then unreference(run, block, 1, freed) end
  end
  wake_all(run, freed)
  return true
end)

-- {versions} → {counts = {admitted, gate, filtered groups, published, trained}, remake = lost groups to be made again, gates, wait}.
-- The i-th version may make tokens of groups below the i-th of `gates`. A run that has no config yet has gate 0.
define('status', function(run, a)
  local begun, gates = call('EXISTS', run .. 'config') == 1, {}
  local found = call('HMGET', run .. 'n', 'admitted', 'filtered_groups', 'published', 'trained')
  for i, version in ipairs(a.versions) do gates[i] = gate(run, config(run), version) end
  local limit = begun and gate(run, config(run), int(found[3])) or 0
  return {
    counts = { int(found[1]), limit, int(found[2]), int(found[3]), int(found[4]) },
    remake = call('SMEMBERS', run .. 'remake'), gates = gates, wait = woken(run, 'version'),
  }
end, true)

-- {worker, home, block, close, mask, refs, groups = {{group or false, how many groups, samples of each}…}} → next group:
-- groups enter, new ones in order (false: whatever numbers are next), or lost ones again. `refs` are the places of all rows.
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
  if #a.refs ~= 16 * total then fail('BAD', 'refs: ' .. #a.refs .. ' bytes for ' .. total .. ' rows; give 16 for each') end
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

-- Takes up to `most` of what is ready below `limit`, near rows first. An older one elsewhere is passed only while it is at
-- most `reach` groups behind: nothing waits for ever because it lies on a node without a worker. A patient one leaves what
-- has just become ready elsewhere to the workers there; also returns in how many ms it need not.
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

-- Parked rows whose group lies below `limit`, in order, as many as `most` groups have room for: a row takes that share of a
-- group which it is. Returns them as ranges, and how many groups' room is left.
local function take_parked(run, stage, most, limit)
  local rows, share, total = {}, 0, 0
  for _, member in ipairs(call('ZRANGE', run .. 'parked:' .. stage.name, 0, -1)) do
    local from, to = ends(member)
    local fixed = read(run, 'f', 8, from, to)
    for row = from, to do
      local group, _, size = unpack_at('<I4I2I2', fixed, 8 * (row - from) + 1)
      if not limit or group < limit then
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
  return rows, floor(max(0, most - share) + 1e-6)
end

-- The rows of claimed groups that this stage has neither committed nor begun before.
local function not_done(run, stage, groups)
  if call('EXISTS', run .. 'partial:' .. stage.name) == 0 then return rows_in(run, groups) end
  local rows = {}
  for i = 1, #groups, 2 do
    for group = groups[i], groups[i + 1] do
      local first, n = rows_of(run, group)
      if call('HDEL', run .. 'partial:' .. stage.name, group) == 0 then
        append(rows, first, first + n - 1)
      else
        local _, fresh = split(run .. 'begun:' .. stage.name, first, first + n - 1)
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

-- {stage, worker, home, most, least, lease, version, patient, token, owner?} → {rows, fixed, made, refs}, or {wait, topic, due = ms
-- until the next lease or headstart ends}. `most` and `least` count rows or groups as the stage takes them: fewer than
-- `least` are not given out. A stage that generates gives the policy version it has loaded, and gets no group that this
-- version may not touch. Parked rows come first, each taking its share of a group, and `refs` tells where their progress lies.
define('claim', function(run, a)
  local cfg, t = config(run), now()
  local stage = stage_of(cfg, a.stage)
  reap(run, cfg, stage, t)
  local taken, n, home, due, parked, most = {}, 0, nil, nil, {}, a.most
  local several = stage.takes ~= 'batch' and value(run, 'warehouses') > 1
  local patient, topic = several and a.patient and a.home > 0, stage.name
  if patient then
    topic = stage.name .. ':' .. int(a.home)
    call('HSET', run .. 'n', 'seen:' .. topic, t)
  end
  local limit = a.version and gate(run, cfg, a.version)
  if stage.takes == 'groups' and value(run, 'parked:' .. stage.name) > 0 then
    parked, most = take_parked(run, stage, most, limit)
  end
  if value(run, 'ready:' .. stage.name) < (a.least or 1) then
    taken, n = {}, 0
  elseif stage.takes == 'batch' then
    taken, home = pick_window(run, cfg, stage), 0
  elseif most > 0 then
    taken, n, home, due = take(run, cfg, stage, most, limit, a.home, patient, t)
  end
  if #taken == 0 and #parked == 0 then
    local lease = call('ZRANGE', run .. 'due:' .. stage.name, 0, 0, 'WITHSCORES')
    call('HSET', run .. 'n', 'idle:' .. topic, 1, 'until:' .. topic, t + (due or 0))
    if lease[2] then due = min(due or lease[2], max(1, lease[2] - t + 1)) end
    return { wait = woken(run, topic), topic = topic, due = due or false }
  end
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
  local pairs_of, left = {}, 0
  for i = 1, #rows, 2 do
    pairs_of[#pairs_of + 1] = { rows[i], rows[i + 1] }
    left = left + rows[i + 1] - rows[i] + 1
  end
  table.sort(pairs_of, function(x, y) return x[1] < y[1] end)
  local held = {}
  for _, pair in ipairs(pairs_of) do append(held, pair[1], pair[2]) end
  local owner = a.owner or ''
  call('HSET', run .. 'leases', a.token, cmsgpack.pack({ stage.name, a.worker, held, left, int(home), t, owner }))
  call('ZADD', run .. 'due:' .. stage.name, t + a.lease, a.token)
  return describe(run, cfg, rows, reads), { rows, reads }
end, false, function(run, kept)
  return kept[1] and describe(run, config(run), kept[1], kept[2]) or kept
end)

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

-- {token, owner?} → what its claim told, without what was parked since, and {stage, worker, left = rows neither committed nor
-- parked}; false when it has ended. For who was told a token and nothing else.
define('lease', function(run, a)
  local lease = lease_of_owner(run, a.token, a.owner)
  if not lease then return false end
  local cfg = config(run)
  local out = describe(run, cfg, lease[3], stage_of(cfg, lease[1]).reads)
  out.stage, out.worker, out.left = lease[1], lease[2], lease[4]
  return out
end, true)

-- {stage, token, owner?}: its worker will not finish these rows; they can be claimed again at once.
define('hand_back', function(run, a)
  local lease = lease_of_owner(run, a.token, a.owner)
  if lease and lease[1] == a.stage then expire(run, config(run), a.token) end
  return true
end)

-- Checks that rows {first, last, …} (ascending) are there and held under `token` by `owner`. Returns the lease, how many they
-- are, and for each range the stretches {first, last, columns, done, state} of equal state.
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

-- What a row was begun with stays part of it: the oldest version that its next progress, or its commit, tells cannot be newer,
-- nor its tokens fewer. The staleness bound rests on this.
local function check_progress(run, stage, rows, made)
  local at = 0
  for i = 1, #rows, 2 do
    local begun = split(run .. 'begun:' .. stage.name, rows[i], rows[i + 1])
    for j = 1, #begun, 2 do
      local before = read(run, 'g', 8, begun[j], begun[j + 1])
      for row = begun[j], begun[j + 1] do
        local oldest, tokens = unpack_at('<i4I4', before, 8 * (row - begun[j]) + 1)
        local now_oldest, now_tokens = unpack_at('<i4I4', made, 8 * (at + row - rows[i]) + 1)
        if now_oldest > oldest or now_tokens < tokens then
          fail('BAD', 'row ' .. row .. ' was begun by version ' .. oldest .. ' with ' .. tokens .. ' tokens, and cannot be of version '
            .. now_oldest .. ' with ' .. now_tokens .. '; tell the oldest version and the number of all of its tokens')
        end
      end
    end
    at = at + rows[i + 1] - rows[i] + 1
  end
end

-- {stage, worker, home, token, owner?, block, close, mask, rows = {first, last, …}, refs, made}: what was made of these rows so far.
-- They leave the lease without being done, and can be claimed one by one; earlier progress of theirs is let go.
define('park', function(run, a)
  local cfg, freed = config(run), {}
  local stage = stage_of(cfg, a.stage)
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
  if #a.refs ~= 16 * total then fail('BAD', 'refs: ' .. #a.refs .. ' bytes for ' .. total .. ' rows; give 16 for each') end
  if #a.made ~= 8 * total then fail('BAD', 'made: ' .. #a.made .. ' bytes for ' .. total .. ' rows; give 8 for each') end
  check_progress(run, stage, a.rows, a.made)
  refer(run, a.worker, a.block, total, a.close)
  local at, left = 0, {}
  for i = 1, #a.rows, 2 do
    local from, to = a.rows[i], a.rows[i + 1]
    local n = to - from + 1
    let_go(run, { stage.producer }, from, to, freed)
    write(run, 'b' .. stage.producer, 16, from, sub(a.refs, 16 * at + 1, 16 * (at + n)))
    write(run, 'g', 8, from, sub(a.made, 8 * at + 1, 8 * (at + n)))
    cut(run .. 'begun:' .. stage.name, from, to)
    add(run .. 'begun:' .. stage.name, from, to)
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
  settle(run, a.token, lease, total)
  make_parked(run, stage, a.rows)
  wake_all(run, freed)
  return true
end)

-- {stage, worker, home, token, owner?, block, close, mask, rows = {first, last, …}, refs, made?}: outputs written, lease released.
-- `refs` are the rows' places in the block; `made` (oldest version, tokens) is given by a stage that generates.
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
  local begun = stage.takes == 'groups' and call('EXISTS', run .. 'begun:' .. stage.name) == 1
  if begun and a.made then check_progress(run, stage, a.rows, a.made) end
  if a.mask ~= 0 then
    if #a.refs ~= 16 * total then fail('BAD', 'refs: ' .. #a.refs .. ' bytes for ' .. total .. ' rows; give 16 for each') end
    refer(run, a.worker, a.block, total, a.close)
  end
  if a.made then
    if #a.made ~= 8 * total then fail('BAD', 'made: ' .. #a.made .. ' bytes for ' .. total .. ' rows; give 8 for each') end
    local tokens = 0
    for i = 0, total - 1 do tokens = tokens + unpack_at('<I4', a.made, 8 * i + 5) end
    count(run, 'generated', total)
    count(run, 'generated_tokens', tokens)
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
      local had = split(run .. 'begun:' .. stage.name, from, from + n - 1)
      for i = 1, #had, 2 do let_go(run, { stage.producer }, had[i], had[i + 1], freed) end
      end_progress(run, stage, from, from + n - 1)
    end
    if a.mask ~= 0 then write(run, 'b' .. stage.producer, 16, from, sub(a.refs, 16 * at + 1, 16 * (at + n))) end
    if a.made then write(run, 'g', 8, from, sub(a.made, 8 * at + 1, 8 * (at + n))) end
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

-- Generated rows of these ranges leave the ledger's flight under `name`; their state becomes `state`.
local function tally(run, rows, name)
  local made, tokens = 0, 0
  for i = 1, #rows, 2 do
    local from, to = rows[i], rows[i + 1]
    local numbers = read(run, 'g', 8, from, to)
    stretches(read(run, 's', 8, from, to), function(entry, x, y)
      local _, _, state = unpack_at('<I4I2I1', entry)
      if state ~= GENERATED then return end  -- a prompt that leaves without a response was never counted
      made = made + y - x + 1
      for j = x, y do tokens = tokens + unpack_at('<I4', numbers, 8 * j + 5) end
    end)
  end
  count(run, name, made)
  count(run, name .. '_tokens', tokens)
end

-- {stage, token, owner?, step, rows, event?}: an optimizer step was made of these rows; the trainer is at version step + 1.
define('train', function(run, a)
  local cfg = config(run)
  local stage = stage_of(cfg, a.stage)
  local trained = value(run, 'trained')
  if a.step ~= trained then fail('BAD', 'step ' .. a.step .. ' is not next: the trainer is at version ' .. trained) end
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
  tally(run, a.rows, 'trained_rows')
  for r, parts in ipairs(ranges) do
    local states = {}
    for i, part in ipairs(parts) do
      states[i] = rep(pack('<I4I2I1I1', part[3], bor(part[4], stage.bit), TRAINED, 0), part[2] - part[1] + 1)
    end
    write(run, 's', 8, a.rows[2 * r - 1], table.concat(states))
  end
  for i = 1, #groups, 2 do cut(run .. 'open', groups[i], groups[i + 1]) end
  call('HSET', run .. 'steps', a.step, cmsgpack.pack(groups))
  call('HSET', run .. 'n', 'trained', a.step + 1)
  tell(run, 'step', a.event)
  settle(run, a.token, lease, total)
  return a.step + 1
end)

-- {step} → the rows that it was made of, for a trainer that comes back and replays it.
define('replay', function(run, a)
  local packed = call('HGET', run .. 'steps', a.step)
  if not packed then
    fail('GONE', 'step ' .. a.step .. ' cannot be replayed: a checkpoint covers it, or its samples were lost with a '
      .. 'warehouse; resume from the checkpoint')
  end
  return describe(run, config(run), rows_in(run, cmsgpack.unpack(packed)))
end, true)

-- {before}: a checkpoint covers the steps below `before`; their rows are released and their bytes reused.
define('release', function(run, a)
  local cfg, freed, released = config(run), {}, 0
  for _, step in ipairs(call('HKEYS', run .. 'steps')) do
    if int(step) < a.before then
      local groups = cmsgpack.unpack(call('HGET', run .. 'steps', step))
      erase_groups(run, cfg, groups, freed)
      call('HDEL', run .. 'steps', step)
      for i = 1, #groups, 2 do released = released + groups[i + 1] - groups[i] + 1 end
    end
  end
  wake_all(run, freed)
  return released
end)

-- {stage, token, groups}: whole groups, held under `token` by a stage that takes groups, leave without being trained.
define('filter', function(run, a)
  local cfg, freed, groups = config(run), {}, {}
  local stage = stage_of(cfg, a.stage)
  table.sort(a.groups)
  for _, group in ipairs(a.groups) do append(groups, group, group) end
  local rows = rows_in(run, groups)
  table.sort(rows)  -- groups that were made again may have later rows
  local lease, total = held(run, stage, a.token, a.owner, rows)
  tally(run, rows, 'filtered_rows')
  settle(run, a.token, lease, total)
  erase_groups(run, cfg, groups, freed)
  for i = 1, #groups, 2 do cut(run .. 'open', groups[i], groups[i + 1]) end
  for _, group in ipairs(a.groups) do call('ZADD', run .. 'filtered', group, group) end
  local oldest = call('ZRANGE', run .. 'open', 0, 0)[1]
  call('ZREMRANGEBYSCORE', run .. 'filtered', '-inf', oldest and '(' .. ends(oldest) or '+inf')
  count(run, 'filtered_groups', #a.groups)
  wake_all(run, freed)
  for _, s in ipairs(cfg.stages) do wake_stage(run, s.name) end
  wake(run, 'version')
  return true
end)

-- ── Warehouses that go ────────────────────────────────────────────────────────────────────────────────────────────────
-- All groups that are there: the open ones, and those of steps that are not released.
local function alive(run)
  local groups = {}
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    append(groups, first, last)
  end
  for _, packed in ipairs(call('HVALS', run .. 'steps')) do
    local trained = cmsgpack.unpack(packed)
    for i = 1, #trained, 2 do append(groups, trained[i], trained[i + 1]) end
  end
  return groups
end

local function lies_on(run, cfg, warehouse, from, to)
  for producer = 0, cfg.producers - 1 do
    local refs = read(run, 'b' .. producer, 16, from, to)
    for i = 0, to - from do
      local block, _, _, at = unpack_at('<I4I4I6I2', refs, 16 * i + 1)
      if block > 0 and at == warehouse then return true end
    end
  end
  return false
end

-- Its node is gone, and so are its bytes. Open groups with any column there are made again: their prompts enter again at
-- the gate under the same numbers, and the ledger counts what was generated as `remade`. Steps whose rows lay there can no
-- longer be replayed.
local function lose(run, a)
  local cfg, freed, lost, rows_lost = config(run), {}, {}, 0
  for _, step in ipairs(call('HKEYS', run .. 'steps')) do
    local groups = cmsgpack.unpack(call('HGET', run .. 'steps', step))
    local rows, hit = rows_in(run, groups), false
    for i = 1, #rows, 2 do hit = hit or lies_on(run, cfg, a.warehouse, rows[i], rows[i + 1]) end
    if hit then
      erase_groups(run, cfg, groups, freed)
      call('HDEL', run .. 'steps', step)
    end
  end
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    for group = first, last do
      local row, n = rows_of(run, group)
      if n > 0 and lies_on(run, cfg, a.warehouse, row, row + n - 1) then
        append(lost, group, group)
        rows_lost = rows_lost + n
        call('SADD', run .. 'remake', group)
      end
    end
  end
  tally(run, rows_in(run, lost), 'remade_rows')
  erase_groups(run, cfg, lost, freed)
  local blocks = call('HGETALL', run .. 'blocks')
  for i = 1, #blocks, 2 do
    if cmsgpack.unpack(blocks[i + 1])[1] == a.warehouse then
      call('HDEL', run .. 'blocks', blocks[i])
      call('HDEL', run .. 'refs', blocks[i])
    end
  end
  local packed = call('HGET', run .. 'warehouses', a.warehouse)
  if packed then call('HDEL', run .. 'names', cmsgpack.unpack(packed).name) end
  call('HDEL', run .. 'warehouses', a.warehouse)
  call('HDEL', run .. 'n', 'used:' .. a.warehouse)
  call('DEL', run .. 'bysize:' .. a.warehouse, run .. 'byaddr:' .. a.warehouse)
  for _, stage in ipairs(cfg.stages) do wake_stage(run, stage.name) end
  wake(run, 'room')
  wake(run, 'version')
  local groups_lost = 0
  for i = 1, #lost, 2 do groups_lost = groups_lost + lost[i + 1] - lost[i] + 1 end
  count(run, 'warehouses_lost', 1)
  return { groups = groups_lost, rows = rows_lost }
end

-- {warehouse} → {groups, rows} that are made again
define('lose', lose)

-- {warehouse, silent = ms}: somebody cannot reach it. → {alive} when it has given a sign of life within that time, else it
-- is lost now → {groups, rows}, or {gone} when it was before.
define('suspect', function(run, a)
  local packed = call('HGET', run .. 'warehouses', a.warehouse)
  if not packed then return { gone = true } end
  local known = cmsgpack.unpack(packed)
  if now() - (known.seen or 0) < a.silent then return { alive = true } end
  return lose(run, a)
end)

-- {warehouse} → {closed = {{block, offset, bytes}…} to be moved away before it may go, open = how many are still written to,
-- wait}. Nothing new is placed on it.
define('leave', function(run, a)
  local closed, open, blocks = {}, 0, call('HGETALL', run .. 'blocks')
  change_warehouse(run, a.warehouse, { leaving = true })
  for i = 1, #blocks, 2 do
    local place = cmsgpack.unpack(blocks[i + 1])
    if place[1] == a.warehouse then
      if call('SISMEMBER', run .. 'open:' .. place[4], blocks[i]) == 1 then
        open = open + 1
      else
        closed[#closed + 1] = { int(blocks[i]), place[2], place[3] }
      end
    end
  end
  wake(run, 'room')
  return { closed = closed, open = open, wait = woken(run, 'room') }
end)

-- {worker, from, blocks = {{old, new}…}}: the bytes of blocks on warehouse `from` were copied into new ones, which the
-- worker holds open. Rows point to the new places; the old bytes are free. A block that was freed meanwhile is left out.
define('move', function(run, a)
  local cfg, moved, freed = config(run), {}, {}
  for _, pair in ipairs(a.blocks) do
    local old, new = call('HGET', run .. 'blocks', pair[1]), call('HGET', run .. 'blocks', pair[2])
    if old and new and cmsgpack.unpack(old)[1] == a.from then
      local source, target = cmsgpack.unpack(old), cmsgpack.unpack(new)
      moved[pair[1]] = { target[1], target[2] - source[2] }
      call('HSET', run .. 'blocks', pair[1], new)
      call('HSET', run .. 'blocks', pair[2], old)  -- freed below, under its new number
    end
    if call('SREM', run .. 'open:' .. a.worker, pair[2]) == 1 then unreference(run, pair[2], 1, freed) end
  end
  local rows = rows_in(run, alive(run))
  for i = 1, #rows, 2 do
    for producer = 0, cfg.producers - 1 do
      local refs, out, changed = read(run, 'b' .. producer, 16, rows[i], rows[i + 1]), {}, false
      for j = 0, rows[i + 1] - rows[i] do
        local block, slot, offset, at = unpack_at('<I4I4I6I2', refs, 16 * j + 1)
        local to = at == a.from and moved[block]
        out[j + 1] = to and pack('<I4I4I6I2', block, slot, offset + to[2], to[1]) or sub(refs, 16 * j + 1, 16 * j + 16)
        changed = changed or to
      end
      if changed then write(run, 'b' .. producer, 16, rows[i], table.concat(out)) end
    end
  end
  wake_all(run, freed)
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
  call('HSET', run .. 'records', a.version, cmsgpack.pack(a.record))
  for _, version in ipairs(call('HKEYS', run .. 'records')) do
    if int(version) < a.version - 1 then call('HDEL', run .. 'records', version) end
  end
  wake(run, 'version')
  for _, stage in ipairs(cfg.stages) do wake_stage(run, stage.name) end
  return true
end)

-- → {version, record?, wait}
define('published', function(run, a)
  local record = call('GET', run .. 'weights')
  return { version = value(run, 'published'), record = record and cmsgpack.unpack(record) or false, wait = woken(run, 'version') }
end, true)

-- {version} → the record of one of the two newest versions, or false
define('weights', function(run, a)
  local record = call('HGET', run .. 'records', a.version)
  return record and cmsgpack.unpack(record) or false
end, true)

-- {worker, most, lease = ms} → {granted, wait, due = ms until the next one's time is over}: one of the `most` that may swap
-- their weights at the same time. Asked for again, it is held for another lease.
define('swap_turn', function(run, a)
  local key, t = run .. 'swapping', now()
  call('ZREMRANGEBYSCORE', key, '-inf', t)
  if call('ZSCORE', key, a.worker) or call('ZCARD', key) < a.most then
    call('ZADD', key, t + a.lease, a.worker)
    return { granted = true }
  end
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  return { granted = false, wait = woken(run, 'swap'), due = max(1, first[2] - t) }
end)

-- {worker}: it has swapped; the next one may.
define('swapped', function(run, a)
  if call('ZREM', run .. 'swapping', a.worker) == 1 then wake(run, 'swap') end
  return true
end)

-- {worker}: it is dead. Its leases end now, and the rest of its open blocks is taken back.
define('forget', function(run, a)
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

-- → {state, reason, wait}
define('state', function(run, a)
  local found = call('HMGET', run .. 'state', 'state', 'reason')
  return { found[1] or '', found[2] or '', woken(run, 'state') }
end, true)

-- {topic}: wake whoever waits on it
define('nudge', function(run, a)
  wake(run, a.topic)
  return true
end)

-- ── Prompts from outside ──────────────────────────────────────────────────────────────────────────────────────────────
-- They wait here, in order and bounded, until the run has them in its own file.
--   feed              position → prompt
--   feed:n            `next` position, `kept` the first that waits, `bytes` that wait, `ended`: no more will come
local function fed(run, field) return int(call('HGET', run .. 'feed:n', field)) end

-- {prompts, first or false, last, most = bytes} → {next}, or {next, wait} when there is no room now. The i-th prompt gets
-- position first + i - 1 (false: the next ones); those that are there already are left as they are.
define('feed', function(run, a)
  local next_one, bytes, put = fed(run, 'next'), 0, {}
  local first = a.first or next_one
  if first > next_one then fail('BAD', 'position ' .. first .. ' is out of order: the next one is ' .. next_one) end
  for i, prompt in ipairs(a.prompts) do
    if first + i - 1 >= next_one then
      put[#put + 1], put[#put + 2] = first + i - 1, prompt
      bytes = bytes + #prompt
    end
  end
  if #put > 0 then
    if fed(run, 'ended') == 1 then fail('BAD', 'position ' .. next_one .. ' comes after the last: the feed was ended there') end
    if bytes > a.most then fail('NOFIT', bytes .. ' bytes of prompts can never wait together: at most ' .. a.most .. '; put fewer at once') end
    if fed(run, 'bytes') + bytes > a.most then return { next = next_one, wait = woken(run, 'feed') } end
    for i = 1, #put, 2 do call('HSET', run .. 'feed', put[i], put[i + 1]) end
    call('HINCRBY', run .. 'feed:n', 'bytes', bytes)
    next_one = call('HINCRBY', run .. 'feed:n', 'next', #put / 2)
  end
  if a.last then call('HSET', run .. 'feed:n', 'ended', 1) end
  if a.last or #put > 0 then wake(run, 'fed') end
  return { next = next_one }
end)

-- {from, most} → {prompts, ended, wait}: those from position `from` on, at most `most`.
define('fed', function(run, a)
  local out = { prompts = {}, ended = fed(run, 'ended') == 1, wait = woken(run, 'fed') }
  for position = a.from, min(fed(run, 'next'), a.from + a.most) - 1 do
    out.prompts[#out.prompts + 1] = call('HGET', run .. 'feed', position)
  end
  return out
end, true)

-- {below}: these positions lie in the run's file. The next one is not below them either: a resumed run has an index of its own.
define('kept', function(run, a)
  for position = fed(run, 'kept'), min(fed(run, 'next'), a.below) - 1 do
    call('HINCRBY', run .. 'feed:n', 'bytes', -call('HSTRLEN', run .. 'feed', position))
    call('HDEL', run .. 'feed', position)
  end
  call('HSET', run .. 'feed:n', 'kept', max(fed(run, 'kept'), a.below), 'next', max(fed(run, 'next'), a.below))
  wake(run, 'feed')
  return true
end)

-- {stage} → how many rows or groups wait to be claimed
define('depth', function(run, a) return value(run, 'ready:' .. a.stage) end, true)

-- Generated samples and tokens that are neither trained nor gone: counted row by row over the open groups, not derived from
-- the other counters; and those that a run has left when it ended.
local function in_flight(run)
  local samples, tokens = value(run, 'left'), value(run, 'left_tokens')
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    local rows = rows_in(run, { first, last })
    for i = 1, #rows, 2 do
      local numbers = read(run, 'g', 8, rows[i], rows[i + 1])
      stretches(read(run, 's', 8, rows[i], rows[i + 1]), function(entry, x, y)
        local _, _, state = unpack_at('<I4I2I1', entry)
        if state ~= GENERATED then return end
        samples = samples + y - x + 1
        for j = x, y do tokens = tokens + unpack_at('<I4', numbers, 8 * j + 5) end
      end)
    end
  end
  return samples, tokens
end

define('ledger', function(run, a)
  local rows_in_flight, tokens_in_flight = in_flight(run)
  return {
    generated = value(run, 'generated'), generated_tokens = value(run, 'generated_tokens'),
    trained = value(run, 'trained_rows'), trained_tokens = value(run, 'trained_rows_tokens'),
    filtered = value(run, 'filtered_rows'), filtered_tokens = value(run, 'filtered_rows_tokens'),
    remade = value(run, 'remade_rows'), remade_tokens = value(run, 'remade_rows_tokens'),
    in_flight = rows_in_flight, in_flight_tokens = tokens_in_flight,
    redelivered = value(run, 'redelivered'),
  }
end, true)

-- The run has ended, and its samples are about to go: the counters alone tell of them from now on.
define('retire', function(run, a)
  local samples, tokens = in_flight(run)
  call('HSET', run .. 'n', 'left', samples, 'left_tokens', tokens, 'live', 0)
  call('DEL', run .. 'open')
  for _, stage in ipairs(config(run).stages) do
    call('HSET', run .. 'n', 'ready:' .. stage.name, 0, 'parked:' .. stage.name, 0)
  end
  return true
end)

-- → {counters, remake}: what a run that resumes at the trainer's version starts from. Groups admitted and not trained are
-- made again; their responses leave the ledger, as they will be generated anew.
define('snapshot', function(run, a)
  local trained, remake = value(run, 'trained'), {}
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    for group = first, last do remake[#remake + 1] = group end
  end
  local counters = { published = trained, trained = trained, admitted = value(run, 'admitted') }
  for _, unit in ipairs({ '', '_tokens' }) do
    local left = 0
    for _, name in ipairs({ 'trained_rows', 'filtered_rows', 'remade_rows' }) do
      counters[name .. unit] = value(run, name .. unit)
      left = left + counters[name .. unit]
    end
    counters['generated' .. unit] = left
  end
  counters.filtered_groups = value(run, 'filtered_groups')
  return { counters = counters, remake = remake }
end, true)

-- {stage} → {ready, leased, parked}. Expired leases of the stage end first.
define('queue', function(run, a)
  local cfg, leased = config(run), 0
  local stage = stage_of(cfg, a.stage)
  reap(run, cfg, stage, now())
  for _, token in ipairs(call('ZRANGE', run .. 'due:' .. stage.name, 0, -1)) do leased = leased + lease_of(run, token)[4] end
  return { ready = value(run, 'ready:' .. stage.name), leased = leased, parked = value(run, 'parked:' .. stage.name) }
end)

-- {stages = {stage → ready, leased, begun (rows with progress), parked (those of them that nobody holds)}, used and capacity
-- by warehouse, …}
define('stats', function(run, a)
  local cfg, t = config(run), now()
  local open = 0
  for _, member in ipairs(call('ZRANGE', run .. 'open', 0, -1)) do
    local first, last = ends(member)
    open = open + last - first + 1
  end
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
    local told = { ready = value(run, 'ready:' .. stage.name), leased = leased, takes = stage.takes }
    out.stages[stage.name] = told
    if stage.takes == 'groups' and stage.producer > 0 then
      told.begun, told.parked = 0, value(run, 'parked:' .. stage.name)
      for _, member in ipairs(call('ZRANGE', run .. 'begun:' .. stage.name, 0, -1)) do
        local first, last = ends(member)
        told.begun = told.begun + last - first + 1
      end
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

-- {group} → its rows as a claim would bring them, with their states, columns and stages done; nothing when it is not there.
define('inspect', function(run, a)
  local first, n = rows_of(run, a.group)
  if n == 0 then return false end
  local out = describe(run, config(run), { first, first + n - 1 })
  out.states = read(run, 's', 8, first, first + n - 1)
  return out
end, true)

-- {from = {state…}, to, reason, event} → {state, changed}. The run's state moves only along what `from` allows, and `event`
-- is told when it does.
define('transition', function(run, a)
  local state = call('HGET', run .. 'state', 'state') or ''
  for _, allowed in ipairs(a.from) do
    if state == allowed then
      call('HSET', run .. 'state', 'state', a.to, 'reason', a.reason, 'since', now())
      tell(run, 'state', a.event)
      wake(run, 'state')
      return { state = a.to, changed = true }
    end
  end
  return { state = state, changed = false }
end)

-- ── Values by key ─────────────────────────────────────────────────────────────────────────────────────────────────────
-- Beside the flow, without stages or leases: a key of a partition has fields, each put may bring some of them, and a later
-- put of the same field replaces it.
--   kv:partitions     partitions, scored by age
--   kv:fields:P       the partition's fields in the order in which they came, as text that only clients read; it only grows, and
--                     goes with the partition's last key. A field's bit is its place
--   kv:entries:P      key → its number u48, then for each put that still holds some of its fields: fields u32 (bits 0–31), u32
--                     (bits 32–63), block u32, slot u32, begin of the packed rows in the block u48
--   kv:tags:P         key → tag → bytes that only clients read

-- Redis takes a bounded number of arguments, Lua a bounded number of results.
local function in_pieces(list, size, visit)
  for i = 1, #list, size do visit(i, min(i + size - 1, #list)) end
end

local function look_up(key, fields)
  local out = {}
  in_pieces(fields, 4096, function(i, j)
    for k, found in ipairs(call('HMGET', key, unpack(fields, i, j))) do out[i + k - 1] = found end
  end)
  return out
end

-- visit(low, high, block, slot, begin) for each record of a key's entry: the fields' bits are 32 of `low` and then those of `high`
local RECORD = '<I4I4I4I4I6'
local function records(entry, visit)
  for at = 7, #entry, 22 do visit(unpack_at(RECORD, entry, at)) end
end

local function fields_of(run, partition) return call('GET', run .. 'kv:fields:' .. partition) or '' end

-- {partition} → its fields
define('kv_fields', function(run, a) return fields_of(run, a.partition) end, true)

-- {worker, home, block, close, refs, partition, known, fields, low, high, keys, tags = {tag → bytes} for each key, or false} →
-- {fields = the partition's, low, high = those that all of the keys have now, tags = for each key}: the i-th key has the fields
-- `low` and `high` where the i-th of `refs` says, and its tags are joined with what it had. The first `known` bytes of `fields` are
-- what the caller knows of the partition's, the rest it adds; refused with FIELDS when others have changed them otherwise.
define('kv_put', function(run, a)
  local keys, entries, freed, gone = run .. 'kv:entries:' .. a.partition, {}, {}, {}
  local written, fields = a.low ~= 0 or a.high ~= 0, fields_of(run, a.partition)
  local grown = sub(fields, 1, #a.fields) ~= a.fields
  if grown and fields ~= sub(a.fields, 1, a.known) then fail('FIELDS', 'partition ' .. a.partition .. ' has other fields by now') end
  if written then
    if #a.refs ~= 16 * #a.keys then fail('BAD', 'refs: ' .. #a.refs .. ' bytes for ' .. #a.keys .. ' keys; give 16 for each') end
    refer(run, a.worker, a.block, #a.keys, a.close)
  end
  if grown then
    fields = a.fields
    call('SET', run .. 'kv:fields:' .. a.partition, fields)
  end
  if not call('ZSCORE', run .. 'kv:partitions', a.partition) then
    call('ZADD', run .. 'kv:partitions', count(run, 'kv_partitions', 1), a.partition)
  end
  local base = written and cmsgpack.unpack(call('HGET', run .. 'blocks', a.block))[2]
  local all_low, all_high = -1, -1
  for i, entry in ipairs(look_up(keys, a.keys)) do
    local out = { entry and sub(entry, 1, 6) or pack('<I6', count(run, 'kv_keys', 1)) }
    local held_low, held_high = a.low, a.high
    records(entry or '', function(low, high, block, slot, begin)
      low, high = band(low, bit.bnot(a.low)), band(high, bit.bnot(a.high))
      held_low, held_high = bor(held_low, low), bor(held_high, high)
      if low == 0 and high == 0 then
        gone[block] = (gone[block] or 0) + 1
      else
        out[#out + 1] = pack(RECORD, low, high, block, slot, begin)
      end
    end)
    if written then
      local block, slot, offset = unpack_at('<I4I4I6', a.refs, 16 * i - 15)
      out[#out + 1] = pack(RECORD, a.low, a.high, block, slot, offset - base)
    end
    all_low, all_high = band(all_low, held_low), band(all_high, held_high)
    entries[2 * i - 1], entries[2 * i] = a.keys[i], table.concat(out)
  end
  in_pieces(entries, 4096, function(i, j) call('HSET', keys, unpack(entries, i, j)) end)
  for block, rows in pairs(gone) do unreference(run, block, rows, freed) end
  local tags, changed = look_up(run .. 'kv:tags:' .. a.partition, a.keys), {}
  for i, key in ipairs(a.keys) do
    local joined = tags[i] and cmsgpack.unpack(tags[i]) or {}
    if a.tags then
      for tag, bytes in pairs(a.tags[i]) do joined[tag] = bytes end
      if next(joined) then changed[#changed + 1], changed[#changed + 2] = key, cmsgpack.pack(joined) end
    end
    tags[i] = joined
  end
  in_pieces(changed, 4096, function(i, j) call('HSET', run .. 'kv:tags:' .. a.partition, unpack(changed, i, j)) end)
  wake_all(run, freed)
  return { fields = fields, low = all_low, high = all_high, tags = tags }
end)

-- {partition, keys} → {fields = the partition's, entries = of each key, or false, places = {{block, warehouse, offset}…}}. A block that
-- has no place lay on a warehouse that was lost.
define('kv_get', function(run, a)
  local entries, blocks = look_up(run .. 'kv:entries:' .. a.partition, a.keys), {}
  for _, entry in ipairs(entries) do
    records(entry or '', function(_, _, block)
      if blocks[block] == nil then
        local packed = call('HGET', run .. 'blocks', block)
        blocks[block] = packed and cmsgpack.unpack(packed)
      end
    end)
  end
  local places = {}
  for block, place in pairs(blocks) do
    if place then places[#places + 1] = { block, place[1], place[2] } end
  end
  return { fields = fields_of(run, a.partition), entries = entries, places = places }
end, true)

-- {partition?} → {partitions = {{partition, {{key, number as bytes, tags}…}}…}}, of one partition or of all, oldest first
define('kv_list', function(run, a)
  local out = {}
  for _, partition in ipairs(call('ZRANGE', run .. 'kv:partitions', 0, -1)) do
    if not a.partition or a.partition == partition then
      local keys, tags, list = call('HGETALL', run .. 'kv:entries:' .. partition), {}, {}
      local tagged = call('HGETALL', run .. 'kv:tags:' .. partition)
      for i = 1, #tagged, 2 do tags[tagged[i]] = cmsgpack.unpack(tagged[i + 1]) end
      for i = 1, #keys, 2 do list[(i + 1) / 2] = { keys[i], sub(keys[i + 1], 1, 6), tags[keys[i]] or {} } end
      out[#out + 1] = { partition, list }
    end
  end
  return { partitions = out }
end, true)

-- {partition, keys} → whether some key is left: keys go, with their values and tags; the last one takes the partition's fields with it.
define('kv_clear', function(run, a)
  local keys, gone, freed = run .. 'kv:entries:' .. a.partition, {}, {}
  for _, entry in ipairs(look_up(keys, a.keys)) do
    records(entry or '', function(_, _, block) gone[block] = (gone[block] or 0) + 1 end)
  end
  in_pieces(a.keys, 4096, function(i, j)
    call('HDEL', keys, unpack(a.keys, i, j))
    call('HDEL', run .. 'kv:tags:' .. a.partition, unpack(a.keys, i, j))
  end)
  for block, rows in pairs(gone) do unreference(run, block, rows, freed) end
  wake_all(run, freed)
  local left = call('EXISTS', keys) == 1
  if not left then call('UNLINK', run .. 'kv:fields:' .. a.partition) end
  return left
end)
