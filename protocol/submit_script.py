"""The script that puts a job into the queue, and chooses the worker that should have it.

The choice is made in Redis, where what each worker holds and how busy it is are known at this moment. It's a wish: `pull_script` says what becomes of
it.
"""

from protocol.queue_lua import FIRST_GUESS_TOKENS, KEEP_QUEUE_S, OUTPUT_WEIGHT, script
from protocol.routing import LANDMARKS

BUSY_TOKENS = 64  # what one job more than the least busy worker has weighs, in prompt tokens that needn't be computed
SESSION_TOKENS = 512  # what holding the session weighs

SUBMIT = script(f"""
-- Put a job at the end of its tenant's line, unless a bound is reached or nobody serves the model. Sent twice, it's there once.
-- KEYS ..., stream, workers, (what it holds, its bell) of each worker that may be preferred
-- ARGV id, envelope, line, gateway, attempt, prompt tokens, most output tokens, weight, most jobs and tokens that may wait of the model,
--      and of the tenant, force ('1': it was accepted before); then, if a worker may be preferred: the session's digest or '', number of landmarks,
--      their digests from the shortest on, the names of those workers
-- -> ok, entry, choice | no_worker | full, scope, milliseconds until there's room
--    choice: held (a worker is preferred and was rung) | passed_over (somebody holds some of it, but another is better) | none
local id, line, gateway = ARGV[1], ARGV[3], ARGV[4]
local ready, tenant = split(line)
local known = read(id)
if known then return {{'ok', known.entry, 'none'}} end
local LANDMARKS = {{{", ".join(map(str, LANDMARKS))}}}

-- The worker that this job should go to, its bell, and what came of the choice: the most prompt tokens that needn't be computed, less what
-- waiting for a busier worker costs. One that has no room isn't waited for.
local function choose()
  if #ARGV < 16 then return '', nil, 'none' end
  local count, busy, least = tonumber(ARGV[15]), {{}}, nil
  local open = redis.call('ZRANGEBYSCORE', ROOM, whole(now_ms() * 1000), '+inf', 'WITHSCORES')
  for i = 1, #open, 2 do
    busy[open[i]] = tonumber(open[i + 1]) % 1000
    least = math.min(least or busy[open[i]], busy[open[i]])
  end
  local best, bell, most, is_held = '', nil, 0, false
  for number = 1, #ARGV - 15 - count do
    local worker, key = ARGV[15 + count + number], FIXED + 1 + 2 * number
    local held, tokens = redis.call('SMISMEMBER', KEYS[key], ARGV[14], unpack(ARGV, 16, 15 + count)), 0
    for at = count, 1, -1 do
      if held[at + 1] == 1 then tokens = LANDMARKS[at]; break end
    end
    if ARGV[14] ~= '' and held[1] == 1 then tokens = tokens + {SESSION_TOKENS} end
    is_held = is_held or tokens > 0
    if busy[worker] and tokens - {BUSY_TOKENS} * (busy[worker] - least) > most then
      best, bell, most = worker, KEYS[key + 1], tokens - {BUSY_TOKENS} * (busy[worker] - least)
    end
  end
  if bell then return best, bell, 'held' end
  return '', nil, is_held and 'passed_over' or 'none'
end
local guess = tonumber(redis.call('HGET', PACE, 'output') or {FIRST_GUESS_TOKENS})
local cost = math.floor(tonumber(ARGV[6]) + {OUTPUT_WEIGHT} * math.min(tonumber(ARGV[7]), guess))
if ARGV[13] ~= '1' then
  if redis.call('ZCOUNT', KEYS[FIXED + 2], whole(now_ms()), '+inf') == 0 then return {{'no_worker'}} end
  local have = redis.call('HMGET', LOAD, 'n', 't', 'n:' .. tenant, 't:' .. tenant)
  local function over(jobs, tokens, most_jobs, most_tokens)
    jobs, tokens = tonumber(jobs or 0), tonumber(tokens or 0)
    if jobs + 1 > tonumber(most_jobs) then return math.max(tokens / math.max(jobs, 1), 1) end
    -- A job that is larger than the bound by itself is taken when nothing else waits.
    if jobs > 0 and tokens + cost > tonumber(most_tokens) then return tokens + cost - tonumber(most_tokens) end
    return nil
  end
  local rate = tonumber(redis.call('HGET', PACE, 'rate') or 0)
  local function wait(tokens, share)
    if rate <= 0 then return 2000 end
    return math.ceil(tokens * 1000 / (rate * share))
  end
  local excess = over(have[3], have[4], ARGV[11], ARGV[12])
  if excess then
    local tenants = math.max(redis.call('ZCARD', READY_I), redis.call('ZCARD', READY_B), 1)
    return {{'full', 'tenant', wait(excess, 1 / tenants)}}
  end
  excess = over(have[1], have[2], ARGV[9], ARGV[10])
  if excess then return {{'full', 'model', wait(excess, 1)}} end
end
local owner, bell, choice = choose() -- before anything is written: what it reads may be damaged
local is_new = redis.call('EXISTS', KEYS[FIXED + 1]) == 0
local entry = redis.call('XADD', KEYS[FIXED + 1], '*', 'id', id, 'gw', gateway, 'job', ARGV[2])
if is_new then
  ensure_group(KEYS[FIXED + 1])
  redis.call('SADD', LINES, line)
end
-- Nobody saves up service by being idle: a tenant that comes back starts where the least served one is, a thousandth of a token before it.
local v = tonumber(redis.call('HGET', FAIR, 'v:' .. tenant) or 0)
if redis.call('HEXISTS', LOAD, 'n:' .. tenant) == 0 then
  local least = nil
  for _, key in ipairs({{READY_I, READY_B}}) do
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if #first > 0 and (not least or tonumber(first[2]) < least) then least = tonumber(first[2]) end
  end
  v = math.max(v, least and least - 1 or tonumber(redis.call('HGET', FAIR, 'floor') or 0))
end
redis.call('HSET', FAIR, 'v:' .. tenant, whole(v), 'w:' .. tenant, ARGV[8])
redis.call('ZADD', ready, whole(v), tenant)
redis.call('HINCRBY', LOAD, 'n', 1); redis.call('HINCRBY', LOAD, 't', cost)
redis.call('HINCRBY', LOAD, 'n:' .. tenant, 1); redis.call('HINCRBY', LOAD, 't:' .. tenant, cost)
redis.call('HINCRBY', LOAD, 'l:' .. line, 1)
redis.call('HINCRBY', LOAD, 'e:' .. line, 1)
local r = {{state = 'W', owner = owner, attempt = tonumber(ARGV[5]), charge = cost, line = line, entry = entry, gateway = gateway}}
write(id, r)
redis.call('ZADD', WAITING, 0, place_of(id, r))
for _, key in ipairs({{LIVE, FAIR, READY_I, READY_B, LOAD, LINES, LEASES, RETURNED, RESUMES, WAITING, KEYS[FIXED + 1]}}) do
  redis.call('EXPIRE', key, {KEEP_QUEUE_S})
end
if bell then redis.call('ZINCRBY', ROOM, 1, owner) end -- as good as taken, for those that come next
ring(bell or BELL)
return {{'ok', entry, choice}}
""")
