-- Values by key, apart from the flow, without stages or leases: a key of a partition has fields, each put may bring some of
-- them, and a later put of the same field replaces it.
--   kv:partitions     partitions, scored by age
--   kv:fields:P       the partition's fields in the order in which they were added, as text that only clients read; it only
--                     grows, and is removed with the partition's last key. A field's bit is its place
--   kv:entries:P      key → its number u48, then for each put that still holds some of its fields: fields u32 (bits 0–31), u32
--                     (bits 32–63), block u32, slot u32, offset of the packed rows in the block u48
--   kv:tags:P         key → tag → bytes that only clients read

-- Redis takes a bounded number of arguments, and Lua a bounded number of results.
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

local RECORD = '<I4I4I4I4I6'

-- Calls visit(low, high, block, slot, offset) for each record of a key's entry; `low` and `high` are the fields' bits.
local function records(entry, visit)
  for at = 7, #entry, 22 do visit(unpack_at(RECORD, entry, at)) end
end

local function fields_of(run, partition) return call('GET', run .. 'kv:fields:' .. partition) or '' end

-- {partition} → its fields
define('key_fields', function(run, a) return fields_of(run, a.partition) end, true)

-- {worker, home, block, close, refs, partition, known, fields, low, high, keys, tags = {tag → bytes} for each key, or false} →
-- {fields = the partition's, low, high = those that all of the keys have now, tags = for each key}. The i-th key has the fields
-- `low` and `high` where the i-th of `refs` points, and `tags` are joined with its old ones. The first `known` bytes of `fields`
-- are those that the caller has read, the rest it adds; refused with FIELDS when other clients have changed them.
define('put_keys', function(run, a)
  local keys, entries, freed, gone = run .. 'kv:entries:' .. a.partition, {}, {}, {}
  local written, fields = a.low ~= 0 or a.high ~= 0, fields_of(run, a.partition)
  local grown = sub(fields, 1, #a.fields) ~= a.fields
  if grown and fields ~= sub(a.fields, 1, a.known) then fail('FIELDS', 'partition ' .. a.partition .. ' has other fields by now') end
  if written then
    check_width('refs', a.refs, 16, #a.keys)
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

-- {partition, keys} → {fields = the partition's, entries = of each key, or false, places = {{block, warehouse, offset}…}}. A block
-- without a place lay on a warehouse that was lost.
define('look_up_keys', function(run, a)
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
define('list_keys', function(run, a)
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

-- {partition, keys} → whether some key is left. Removes keys with their values and tags; the last one takes the partition's fields
-- with it.
define('clear_keys', function(run, a)
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
