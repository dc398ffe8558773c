-- Arrays of fixed-width entries, stored as strings in segments of SEGMENT entries.

-- Entries from..to of an array as one string; entries that were never written are zeros.
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

-- Writes entries from `from` on.
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

-- The sum of the numbers (u32) that begin at byte `at` of entries i..j (from 0).
local function sum_of(bytes, width, at, i, j)
  local total = 0
  for k = i, j do total = total + unpack_at('<I4', bytes, width * k + at) end
  return total
end

-- Pairs of values as entries of format `unit`. One call for many values costs little more than a call for one.
local function pack_pairs(unit, values)
  local out, n = {}, #values
  for from = 1, n, 512 do
    local to = min(n, from + 511)
    out[#out + 1] = pack('<' .. rep(unit, (to - from + 1) / 2), unpack(values, from, to))
  end
  return table.concat(out)
end

-- Counts that entries from..to were added (by = 1) or removed (-1). A segment without entries is deleted, unless it is the
-- newest one, which holds entry `newest`.
local function occupy(run, cfg, field, from, to, by, newest)
  local first = floor(max(0, from - 1) / SEGMENT)  -- when entries are added: the segment that was the newest
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

-- Calls visit(entry, i, j) for each stretch i..j (from 0) of equal 8-byte entries.
local function stretches(bytes, visit)
  local n, i = #bytes / 8, 0
  local first = sub(bytes, 1, 8)
  if bytes == rep(first, n) then return visit(first, 0, n - 1) end
  while i < n do
    local entry, j = sub(bytes, 8 * i + 1, 8 * i + 8), i
    while sub(bytes, 8 * j + 9, 8 * j + 16) == entry do j = j + 1 end
    visit(entry, i, j)
    i = j + 1
  end
end
