-- Sets of number ranges: sorted sets of 'first-last', scored by first.

local function ends(member)
  local a, b = member:match('^(%d+)-(%d+)$')
  return tonumber(a), tonumber(b)
end

local function range(a, b) return string.format('%d-%d', a, b) end

-- Adds a..b, which is not in the set.
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

-- Removes a..b; returns how many numbers of it were in the set.
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

-- Splits a..b into two flat lists of ranges: those in the set, and those not in it.
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

-- Appends a..b to a flat list {first, last, first, last, …}, joined to the last range when it follows directly.
local function append(list, a, b)
  if #list > 0 and list[#list] == a - 1 then
    list[#list] = b
  else
    list[#list + 1], list[#list + 2] = a, b
  end
end

-- The ranges of a set, as a flat list.
local function members(key)
  local list = {}
  for _, member in ipairs(call('ZRANGE', key, 0, -1)) do append(list, ends(member)) end
  return list
end

-- How many numbers the ranges of a flat list have.
local function size_of(list)
  local total = 0
  for i = 1, #list, 2 do total = total + list[i + 1] - list[i] + 1 end
  return total
end
