-- Warehouses join, leave, and are lost.

-- {warehouse = name, node, path, bytes}: a warehouse joins with all of its bytes free. Repeating it changes nothing.
define('join_warehouse', function(run, a)
  if not call('HGET', run .. 'names', a.warehouse) then
    local number = count(run, 'warehouses', 1)
    call('HSET', run .. 'names', a.warehouse, number)
    call('HSET', run .. 'warehouses', number,
      cmsgpack.pack({ name = a.warehouse, node = a.node, path = a.path, bytes = a.bytes, host = '', port = 0, leaving = false }))
    call('HSET', run .. 'n', 'used:' .. number, 0)
    call('ZADD', run .. 'bysize:' .. number, a.bytes, '0')
    call('ZADD', run .. 'byaddr:' .. number, 0, '0')
    wake(run, 'warehouses')
  end
  return true
end)

local function change_warehouse(run, number, change)
  local packed = call('HGET', run .. 'warehouses', number)
  if not packed then no_warehouse(number) end
  local known = cmsgpack.unpack(packed)
  for field, new in pairs(change) do known[field] = new end
  call('HSET', run .. 'warehouses', number, cmsgpack.pack(known))
  return known
end

-- {warehouse, host, port}: the address for other nodes; repeated every few seconds as a heartbeat.
define('announce_warehouse', function(run, a)
  change_warehouse(run, a.warehouse, { host = a.host, port = a.port, seen = now(run) })
  return true
end)

-- → number → {name, node, path, bytes, host, port, leaving}
define('warehouses', function(run, a)
  local out, found = {}, call('HGETALL', run .. 'warehouses')
  for i = 1, #found, 2 do out[found[i]] = cmsgpack.unpack(found[i + 1]) end
  return out
end, true)

-- All groups in the run: the open ones, and those of steps that are not released.
local function alive(run)
  local groups = members(run .. 'open')
  for _, packed in ipairs(call('HVALS', run .. 'steps')) do
    local trained = cmsgpack.unpack(packed)
    for i = 1, #trained, 2 do append(groups, trained[i], trained[i + 1]) end
  end
  return groups
end

-- Whether any column of rows from..to lies on the warehouse.
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

-- Removes a warehouse whose bytes are lost. Open groups with any column there must be admitted again under the same numbers,
-- and the ledger counts their generated samples as `remade`. Steps whose rows lay there can no longer be replayed.
local function lose(run, a)
  local cfg, freed, lost, rows_lost = config(run), {}, {}, 0
  for _, version in ipairs(call('HKEYS', run .. 'steps')) do
    local groups = cmsgpack.unpack(call('HGET', run .. 'steps', version))
    local rows, hit = rows_in(run, groups), false
    for i = 1, #rows, 2 do hit = hit or lies_on(run, cfg, a.warehouse, rows[i], rows[i + 1]) end
    if hit then
      erase_groups(run, cfg, groups, freed)
      call('HDEL', run .. 'steps', version)
      call('HDEL', run .. 'replays', version)
      call('SREM', run .. 'skipped', version)
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
  count(run, 'warehouses_lost', 1)
  return { groups = size_of(lost), rows = rows_lost }
end

-- {warehouse} → {groups, rows} that are made again
define('lose_warehouse', lose)

-- {warehouse, silent = ms}: a worker cannot reach it. → {alive = ms since its last heartbeat} when that is less; otherwise it
-- is removed → {groups, rows}, or {gone} when it was removed before.
define('suspect_warehouse', function(run, a)
  local packed = call('HGET', run .. 'warehouses', a.warehouse)
  if not packed then return { gone = true } end
  local known = cmsgpack.unpack(packed)
  local age = now(run) - (known.seen or 0)
  if age < a.silent then return { alive = age } end
  return lose(run, a)
end)

-- {warehouse} → {closed = {{block, offset, bytes}…} to be moved away, open = how many blocks are still written to, wait}. Nothing
-- new is placed on it.
define('leave_warehouse', function(run, a)
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

-- {worker, from, blocks = {{old, new}…}}: the bytes of blocks on warehouse `from` were copied into new blocks, which the worker
-- holds open. Rows point to the new places; the old bytes are free. A block that was freed in the meantime is skipped.
define('move_blocks', function(run, a)
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
