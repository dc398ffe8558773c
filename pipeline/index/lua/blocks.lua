-- Blocks: room in the arenas of warehouses. Best fit by size; free neighbours are joined.

-- Frees a block.
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
      offset, size = int(before), length + size
    end
  end
  call('ZADD', sizes, size, string.format('%d', offset))
  call('ZADD', addresses, offset, string.format('%d', offset))
end

-- `rows` rows point to a block no more; it is freed with the last one.
local function unreference(run, block, rows, freed)
  if call('HINCRBY', run .. 'refs', block, -rows) <= 0 then
    free(run, block)
    freed.room = true
  end
end

-- Rows point to a block that its worker has written. `close`: the worker writes no more to it.
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

-- The error for a warehouse that is not, or no more, in the run.
local function no_warehouse(number)
  fail('NOHOUSE', 'warehouse ' .. number .. ' is not in this run: it has left, or its node was lost')
end

-- The worker writes no more to these blocks.
local function close(run, worker, blocks, freed)
  for _, block in ipairs(blocks) do
    if call('SREM', run .. 'open:' .. worker, block) == 1 then unreference(run, block, 1, freed) end
  end
  wake_all(run, freed)
end

-- Takes a block of `size` bytes, a multiple of 64, so that at most `most` bytes of the warehouse are used: {block, offset}, or nil
-- when there is no room now.
local function take_room(run, worker, warehouse, size, most)
  local sizes = run .. 'bysize:' .. warehouse
  local offset = call('ZRANGEBYSCORE', sizes, size, '+inf', 'LIMIT', 0, 1)[1]
  if not offset or value(run, 'used:' .. warehouse) + size > most then return nil end
  local left = int(call('ZSCORE', sizes, offset)) - size
  call('ZREM', sizes, offset)
  call('ZREM', run .. 'byaddr:' .. warehouse, offset)
  if left > 0 then
    local rest = string.format('%d', offset + size)
    call('ZADD', sizes, left, rest)
    call('ZADD', run .. 'byaddr:' .. warehouse, rest, rest)
  end
  local block = count(run, 'blocks', 1)
  call('HSET', run .. 'blocks', block, cmsgpack.pack({ warehouse, int(offset), size, worker }))
  call('HSET', run .. 'refs', block, 1)
  call('SADD', run .. 'open:' .. worker, block)
  count(run, 'used:' .. warehouse, size)
  return { block = block, offset = int(offset) }
end

local function rounded(bytes) return math.ceil(bytes / 64) * 64 end

-- A block of `bytes` for a worker's next write, where `reserve` bytes of its warehouse stay free; false: there is no room.
local function spare_room(run, worker, warehouse, bytes, reserve)
  local known = bytes > 0 and call('HGET', run .. 'warehouses', warehouse)
  known = known and cmsgpack.unpack(known)
  return known and not known.leaving and take_room(run, worker, warehouse, rounded(bytes), known.bytes - reserve) or false
end

-- {warehouse, worker, bytes, reserve, close} → {block, offset}, or {wait} when there is no room now. `reserve` bytes stay free
-- for later stages, so that a source cannot take the room that its samples need to be finished. `close`: blocks that the
-- worker writes no more to.
define('allocate', function(run, a)
  local size = rounded(a.bytes)
  local known = call('HGET', run .. 'warehouses', a.warehouse)
  if not known then no_warehouse(a.warehouse) end
  known = cmsgpack.unpack(known)
  if known.leaving then fail('NOHOUSE', 'warehouse ' .. known.name .. ' is leaving the run; write to another one') end
  close(run, a.worker, a.close, {})
  local room = known.bytes - a.reserve
  if size > room then
    fail('NOFIT', 'a block of ' .. size .. ' bytes can never fit into warehouse ' .. known.name .. ': it has '
      .. room .. ' bytes for it; write fewer rows at once or give it more')
  end
  return take_room(run, a.worker, a.warehouse, size, room) or { wait = woken(run, 'room') }
end)

-- {worker, blocks}: the worker writes no more to these blocks.
define('close_blocks', function(run, a)
  close(run, a.worker, a.blocks, {})
  return true
end)
