-- External prompts. They wait here, in order and bounded, until the run has stored them in its own file.
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
