-- The time by which leases end, in libraries of functions that have leases.

local GAP, SHORTEST_GAP = 2500, 250  -- most ms between two calls that count as time; fewer where leases are short
local KEPT = 1000  -- ms between two records of the time

local function call(...) return redis.call(...) end
local function int(text) return tonumber(text or 0) or 0 end

-- The server's clock in ms, which may be set. For people to read, and never compared.
local function wall()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The time behind the prefix `run` in ms, by which leases end: the server's clock without what it jumps, and without the
-- time in which nobody called. Whoever waits for a lease to end calls at least every quarter of the shortest lease, so a
-- longer gap is a clock that was set, or processes that were stopped together, as with their machine: none of them could
-- renew its lease. The key `clock` keeps, for a server that is started again, how much less it counts. `lease`: a length
-- that the caller uses.
local clocks = {}  -- run → {the server's clock at the last call, ms that this time is behind it, when that was kept, longest gap}
local remembered = 0
local function clock_of(run, t)
  local clock = clocks[run]
  if clock then return clock end
  if remembered == 1000 then clocks, remembered = {}, 0 end
  local kept = call('GET', run .. 'clock')
  clock = kept and cmsgpack.unpack(kept) or { t, 0, 0, GAP }
  clock[4] = clock[4] or GAP
  clocks[run], remembered = clock, remembered + 1
  return clock
end
local function now(run, lease)
  local t = wall()
  local clock = clock_of(run, t)
  if lease then clock[4] = math.min(clock[4], math.max(SHORTEST_GAP, lease / 4)) end
  local gap = t - clock[1]
  local skipped = gap - math.max(0, math.min(gap, clock[4]))
  clock[1], clock[2] = t, clock[2] + skipped
  if skipped ~= 0 or t - clock[3] >= KEPT then
    clock[3] = t
    call('SET', run .. 'clock', cmsgpack.pack(clock))
  end
  return t - clock[2]
end

-- When one that waits `due` ms for a lease to end looks again.
local function look_again(run, due) return math.min(due, clock_of(run, wall())[4]) end
