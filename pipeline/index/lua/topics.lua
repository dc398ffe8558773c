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
