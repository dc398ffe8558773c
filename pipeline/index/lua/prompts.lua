-- Prompts: those that other programs put, and pass rates, by which a run samples prompts by difficulty.

-- External prompts wait here, in order and bounded, until the run has stored them in its own file.
--   feed              position → prompt
--   feed:n            `next` position, `kept` the first that waits, `bytes` that wait, `ended`: no more will come

local function fed(run, field) return int(call('HGET', run .. 'feed:n', field)) end

-- {prompts, first or false, last, most = bytes} → {next}, or {next, wait} when there is no room now. The i-th prompt gets
-- position first + i - 1 (false: the next ones); positions that are taken already are left as they are.
define('put_prompts', function(run, a)
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

-- {from, most} → {prompts, ended, wait}: at most `most` prompts from position `from` on.
define('read_prompts', function(run, a)
  local out = { prompts = {}, ended = fed(run, 'ended') == 1, wait = woken(run, 'fed') }
  for position = a.from, min(fed(run, 'next'), a.from + a.most) - 1 do
    out.prompts[#out.prompts + 1] = call('HGET', run .. 'feed', position)
  end
  return out
end, true)

-- {below}: these positions lie in the run's file. The next position is not below them either, because a resumed run has a new
-- index.
define('remove_prompts', function(run, a)
  for position = fed(run, 'kept'), min(fed(run, 'next'), a.below) - 1 do
    call('HINCRBY', run .. 'feed:n', 'bytes', -call('HSTRLEN', run .. 'feed', position))
    call('HDEL', run .. 'feed', position)
  end
  call('HSET', run .. 'feed:n', 'kept', max(fed(run, 'kept'), a.below), 'next', max(fed(run, 'next'), a.below))
  wake(run, 'feed')
  return true
end)

-- Pass rates of prompts, of a run that samples them by difficulty.
--   pick              `next` position in the source of prompts, `changes` of pass rates so far
--   chosen            group → {position, prompt}, until the group leaves the run
--   outcomes          group → {mean reward, taught = 1 or 0}, of groups that have not left
--   rates             prompt → {mean reward, taught, streak}     recent   prompts scored by the number of their last change
-- A group counts when it leaves, trained or dropped, so that a group that is made again counts once. What a choice depends on
-- is therefore the same in a run that is replayed from a checkpoint, see `resume_point`.

local MOST_PROMPTS = 65536  -- with a pass rate; those that changed least recently are forgotten

local function picked(run, field) return int(call('HGET', run .. 'pick', field)) end

-- Groups {first, last, …} leave the run: their outcomes become the pass rates of their prompts.
local function rate_groups(run, groups)
  if call('EXISTS', run .. 'chosen') == 0 then return end
  for i = 1, #groups, 2 do
    for group = groups[i], groups[i + 1] do
      local chosen, outcome = call('HGET', run .. 'chosen', group), call('HGET', run .. 'outcomes', group)
      if chosen and outcome then
        local prompt, rate = cmsgpack.unpack(chosen)[2], cmsgpack.unpack(outcome)
        local before = call('HGET', run .. 'rates', prompt)
        before = before and cmsgpack.unpack(before) or { 0, 0, 0 }
        rate = rate[2] ~= 0 and { rate[1], 1, 0 } or { rate[1], before[2], before[3] + 1 }
        call('HSET', run .. 'rates', prompt, cmsgpack.pack(rate))
        call('ZADD', run .. 'recent', call('HINCRBY', run .. 'pick', 'changes', 1), prompt)
      end
      call('HDEL', run .. 'chosen', group)
      call('HDEL', run .. 'outcomes', group)
    end
  end
  local over = call('ZCARD', run .. 'recent') - MOST_PROMPTS
  if over > 0 then
    local gone = call('ZPOPMIN', run .. 'recent', over)
    for i = 1, #gone, 2 do call('HDEL', run .. 'rates', gone[i]) end
  end
end

-- {groups = {group…}, since} → {next = position or false, chosen = {position or false…}, changes, rates = {prompt, rate…} that
-- changed since, the oldest change first}
define('pass_rates', function(run, a)
  local out = { next = call('HEXISTS', run .. 'pick', 'next') == 1 and picked(run, 'next'), chosen = {}, rates = {} }
  for i, group in ipairs(a.groups) do
    local chosen = call('HGET', run .. 'chosen', group)
    out.chosen[i] = chosen and cmsgpack.unpack(chosen)[1]
  end
  for i, prompt in ipairs(call('ZRANGEBYSCORE', run .. 'recent', '(' .. a.since, '+inf')) do
    out.rates[i] = { prompt, cmsgpack.unpack(call('HGET', run .. 'rates', prompt)) }
  end
  out.changes = picked(run, 'changes')
  return out
end, true)

-- {groups = {group, position, prompt}…, next}: the prompts of groups that are about to be admitted.
define('choose_prompts', function(run, a)
  for _, entry in ipairs(a.groups) do
    call('HSETNX', run .. 'chosen', entry[1], cmsgpack.pack({ entry[2], entry[3] }))
  end
  call('HSET', run .. 'pick', 'next', a.next)
  return true
end)

-- {groups = {group, mean reward, 1 if it taught something or 0}…}. Can be repeated. Groups of a run that does not sample by difficulty are ignored.
define('put_outcomes', function(run, a)
  for _, entry in ipairs(a.groups) do
    if call('HEXISTS', run .. 'chosen', entry[1]) == 1 then
      call('HSET', run .. 'outcomes', entry[1], cmsgpack.pack({ entry[2], entry[3] }))
    end
  end
  return true
end)

-- What a checkpoint keeps of it: false for a run that does not sample by difficulty. `load_rates` starts from it.
local function kept_rates(run)
  if call('EXISTS', run .. 'pick') == 0 then return false end
  local out = { next = picked(run, 'next'), chosen = {}, rates = {} }
  local chosen = call('HGETALL', run .. 'chosen')
  for i = 1, #chosen, 2 do
    local entry = cmsgpack.unpack(chosen[i + 1])
    out.chosen[#out.chosen + 1] = { int(chosen[i]), entry[1], entry[2] }
  end
  for i, prompt in ipairs(call('ZRANGE', run .. 'recent', 0, -1)) do
    out.rates[i] = { prompt, cmsgpack.unpack(call('HGET', run .. 'rates', prompt)) }
  end
  return out
end

local function load_rates(run, kept)
  call('HSET', run .. 'pick', 'next', kept.next, 'changes', #kept.rates)
  for _, entry in ipairs(kept.chosen) do
    call('HSET', run .. 'chosen', entry[1], cmsgpack.pack({ entry[2], entry[3] }))
  end
  for i, entry in ipairs(kept.rates) do
    call('HSET', run .. 'rates', entry[1], cmsgpack.pack(entry[2]))
    call('ZADD', run .. 'recent', i, entry[1])
  end
end
