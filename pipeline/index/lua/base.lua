-- The index: where the columns of each sample lie, which rows are ready for which stage, which worker holds them under a
-- lease, and which policy version made them. Every function is one atomic step for a whole batch of rows; its arguments and
-- its reply are one msgpack value each.
--
--   admit ─▶ ready(stage) ─claim▶ leased ─commit▶ columns added ─▶ ready(next stage) … ─claim▶ trained ─▶ released
--                ▲                   │ lease expired, or worker forgotten
--                └───────────────────┘ (redelivered, under a new token)
--
-- A stage that takes groups may park a row with what it has made so far; any of its workers continues it:
--
--   leased ─park▶ parked(stage) ─claim▶ leased ─park▶ … ─commit▶     a lost lease: parked again, with the last parked progress
--
-- Two stages may take turns with a row: each parks it for the other, and either commits it. The first of them (`origin` of both)
-- is offered rows that become ready.
--
-- Data of rows lies in arrays, cut into segments of 4096 rows; rows that are ready, open or leased are sets of number ranges.
-- A batch of rows in the same state is read, compared and written as one string each, so a batch of 256 costs little more
-- than one row. Row numbers are never reused, so a number is its own generation.
--
-- Keys of a run, all with one hash tag, `asyncdock:{run}:`
--   config            the stages, P, S, W, η as msgpack, written once
--   n                 counters: admitted groups, published and trained versions, next ids, queue depths, the ledger
--   s:SEG             rows' state: columns u32, finished stages u16, condition u8 (0: no such row), 0
--   f:SEG             rows' group u32, place in it u16, samples of the group u16
--   g:SEG             rows' oldest version i32, tokens u32
--   turns:SEG         generated rows' turns u32, in runs with environments
--   b0:SEG b1:SEG …   where the columns lie that admission (0) or a producing stage wrote: block u32, slot u32, offset u48,
--                     warehouse u16
--   q:SEG             groups' first row u48, samples u16
--   live:FIELD        segment → how many rows (s) or groups (q) it holds
--   open              groups that are admitted and not yet consumed
--   remake            groups that were lost and must be admitted again
--   filtered          groups that were dropped while an older one was open
--   amounts           what stages have done, by name, that no step has reported yet
--   spared            open groups that their step may not drop, though they teach nothing
--   ready:STAGE:HOME  rows (or groups, for stages that take groups) that can be claimed, by the warehouse of the commit that
--                     made them ready
--   count:STAGE       group → how many of its rows are ready (group stages)
--   gone:STAGE        group → how many of its rows a releasing stage has released
--   partial:STAGE     groups of which this stage has committed, or begun, some rows while others are redelivered (of stages that
--                     take turns, under the first one's name)
--   begun:STAGE       rows with progress: parked at least once and not committed (likewise). b of the stage points to the progress
--                     (its columns are not set in s), g has its oldest version and tokens
--   parked:STAGE      rows with progress that are not leased: they are claimed first
--   holder:STAGE      row → 'MS WORKER': the worker of this stage, which takes turns with another one, that parked the row for
--                     it, and so may have keys and values of its tokens; and when the row came back
--   leases            token → {stage, worker, row ranges, rows not committed, home, ms when it was claimed, owner}. A token is
--                     128 random bits that the client made. A call with a token must name its owner: '' for the run's own workers
--   due:STAGE         token → deadline in ms
--   steps             trainer's version → groups trained at it, until they are released
--   replays           trainer's version → groups of earlier steps that were trained again at it, until a checkpoint covers it
--   skipped           versions in `steps` at which a step was skipped: its groups are not trained again
--   blocks            block → {warehouse, offset, bytes, worker}   refs   block → rows that point to it, + 1 while it is open
--   open:WORKER       blocks that the worker still writes to
--   warehouses        number → {name, node, path, host, port, bytes, leaving, seen}   names   name → number
--   bysize:W, byaddr:W   free extents of warehouse W: offset scored by size and by address (best fit, coalesced)
--   forgotten         workers that were taken for dead and have not claimed since
--   alive             worker → {ms of its last sign of life, its stages, its policy version, whether it is ready}
--   state             the run's state, and the reason of it
--   events            the run's events, a stream
--   doc:NAME          documents of the run, and orders, ranks:…, critic:…, loader:… its logs: docs/run-documents.md
--   swapping          workers that swap their weights now, scored by deadline in ms
--   wake:TOPIC        a stream of one entry, read with BLOCK. Topics: a stage's name, alone or with `:HOME`; `room`, `version`,
--                     `state`, `swap`, `warehouses` (one has joined), `fed` (prompts were put), `feed` (prompts were removed)
--   pick, chosen, outcomes, rates, recent   pass rates of prompts, see prompts.lua
--   weights, records  the record of the published version, and of the two newest by their number
--   clock             the time of its leases, see clock.lua
--   replies:CLIENT    lane → its last reply, for a client that repeats a call after a lost connection
--
-- Sets of ranges are sorted sets of 'first-last' scored by first; neighbouring ranges are joined.

local configs, configured = {}, 0  -- decoded configs by run, and how many; a run's config never changes

local SEGMENT = 4096
local PRESENT = 10000  -- ms after its last claim for which a node counts as one with workers
local LIVE, GENERATED, TRAINED = 1, 2, 3

-- The libraries do not exist while this file is loaded; the first call binds them.
local rep, sub, floor, min, max, pack, unpack_at, band, bor
local function bind()
  if rep then return end
  rep, sub, floor, min, max = string.rep, string.sub, math.floor, math.min, math.max
  pack, unpack_at, band, bor = struct.pack, struct.unpack, bit.band, bit.bor
end

local function fail(code, text) error(code .. ' ' .. text, 0) end

local function config(run)
  if not configs[run] then
    local packed = call('GET', run .. 'config')
    if not packed then fail('NORUN', 'run is not in this index') end
    if configured == 1000 then configs, configured = {}, 0 end
    configs[run], configured = cmsgpack.unpack(packed), configured + 1
    for _, stage in ipairs(configs[run].stages) do stage.origin = stage.origin or stage.name end  -- of an older release
    configs[run].replay_versions = configs[run].replay_versions or 0
  end
  return configs[run]
end

local function count(run, field, by) return call('HINCRBY', run .. 'n', field, by) end
local function value(run, field) return int(call('HGET', run .. 'n', field)) end

local function stage_of(cfg, name)
  for _, stage in ipairs(cfg.stages) do
    if stage.name == name then return stage end
  end
  fail('BAD', 'stage ' .. name .. ' is not declared')
end

-- The number of a request, which begins with 'CLIENT-NUMBER:'. A client uses a lane for one request at a time.
local function number_of(request) return tonumber(request:match('^%w+-(%d+):') or 0) end

-- Registers a function that clients call. `reads`: it changes nothing, so its reply is not kept for repeated calls. With
-- `recall`, only the second result of `body` is kept, and `recall` makes the reply of a repeated call from it.
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
      if known and number_of(known) > number_of(request) then
        return redis.error_reply('LATE ' .. name .. ': its client has given it up, and called again')
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

-- Topics, which clients wait on, and the run's event stream.

local function wake(run, topic) call('XADD', run .. 'wake:' .. topic, 'MAXLEN', 1, '*', 'at', now(run)) end

-- Wakes a topic only when a claim that waits on it has found nothing since the last wake-up. Claims wait on the topic of
-- their stage, or of their stage and home.
local function wake_idle(run, topic)
  if call('HGET', run .. 'n', 'idle:' .. topic) ~= '1' then return false end
  call('HSET', run .. 'n', 'idle:' .. topic, 0)
  wake(run, topic)
  return true
end

-- Wakes the claims that wait for rows of a stage, on every node. With time t, claims on nodes whose headstart still lasts
-- are left alone: they know when to come again.
local function wake_stage(run, name, t)
  wake_idle(run, name)
  local last = value(run, 'warehouses')
  for home = 1, last > 1 and last or 0 do
    local place = name .. ':' .. home
    if not t or value(run, 'until:' .. place) <= t then wake_idle(run, place) end
  end
end

local function wake_all(run, topics) for topic in pairs(topics) do wake(run, topic) end end

-- Appends an entry to the run's event stream, unless `event` is nil or false.
local function tell(run, kind, event)
  if not event then return end
  call('XADD', run .. 'events', 'MAXLEN', '~', 100000, '*', 'kind', kind, 'time', event.time, 'data', event.data)
end

-- How many ms ago a topic was woken, by the time of leases; false: never.
local function age(run, topic)
  local last = call('XREVRANGE', run .. 'wake:' .. topic, '+', '-', 'COUNT', 1)[1]
  return last and max(0, now(run) - int(last[2][2])) or false
end

-- The position of a topic: the id of its last wake-up.
local function woken(run, topic)
  local last = call('XREVRANGE', run .. 'wake:' .. topic, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1] or '0-0'
end

-- {topic}: wake all clients that wait on it.
define('wake', function(run, a)
  wake(run, a.topic)
  return true
end)
