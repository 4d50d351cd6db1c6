"""The Lua scripts of a model's queue: each is one step of a job's life, and nothing happens to a job outside them.

KEYS of every script begin with the fixed keys of the queue, in the order of `QueueKeys`; what follows is stated at each. All carry the model's
hash tag, and no script touches a key that isn't among its KEYS. Time is Redis' own. `docs/queue.md` has the table of states.

A job's record is `state|owner|attempt|charge|line|entry|gateway`. States: W waits in its line, L leased to its owner, H handed over (nobody has
it, its gateway is to continue it), R returned (continued by its gateway, served before all lines).
"""

from protocol.queue_lua import (
    BATCH_EVERY,
    FIRST_GUESS_TOKENS,
    KEEP_DEAD_S,
    KEEP_QUEUE_S,
    MAX_DEAD,
    OUTPUT_WEIGHT,
    script,
)

SUBMIT = script(f"""
-- Put a job at the end of its tenant's line, unless a bound is reached or nobody serves the model. Sent twice, it's there once.
-- KEYS ..., stream, workers
-- ARGV id, envelope, line, gateway, attempt, prompt tokens, most output tokens, weight, most jobs and tokens that may wait of the model,
--      and of the tenant, force ('1': it was accepted before)
-- -> ok, entry | no_worker | full, scope, milliseconds until there's room
local id, line, gateway = ARGV[1], ARGV[3], ARGV[4]
local ready, tenant = split(line)
local known = read(id)
if known then return {{'ok', known.entry}} end
local guess = tonumber(redis.call('HGET', PACE, 'output') or {FIRST_GUESS_TOKENS})
local cost = math.floor(tonumber(ARGV[6]) + {OUTPUT_WEIGHT} * math.min(tonumber(ARGV[7]), guess))
if ARGV[13] ~= '1' then
  if redis.call('ZCOUNT', KEYS[13], whole(now_ms()), '+inf') == 0 then return {{'no_worker'}} end
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
local is_new = redis.call('EXISTS', KEYS[12]) == 0
local entry = redis.call('XADD', KEYS[12], '*', 'id', id, 'gw', gateway, 'job', ARGV[2])
if is_new then
  ensure_group(KEYS[12])
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
write(id, {{state = 'W', owner = '', attempt = tonumber(ARGV[5]), charge = cost, line = line, entry = entry, gateway = gateway}})
for _, key in ipairs({{LIVE, FAIR, READY_I, READY_B, LOAD, LINES, LEASES, RETURNED, RESUMES, KEYS[12]}}) do
  redis.call('EXPIRE', key, {KEEP_QUEUE_S})
end
ring()
return {{'ok', entry}}
""")

PULL = script(f"""
-- Hand the next job to a worker: one that was returned, else the oldest of the tenant with the least virtual time.
-- KEYS ..., streams of some lines   ARGV worker, lease ms, the names of those lines
-- -> job, id, line, entry, attempt, gateway, deliveries, envelope, lines that are likely next... | none
--    | need, line (call again with it) | stray, id, line, entry, gateway, envelope (an entry that nobody submitted)
allow_when_full()
local worker, streams = ARGV[1], {{}}
for i = 3, #ARGV do streams[ARGV[i]] = KEYS[9 + i] end

local function hand_out(id, r, stream, envelope)
  r.state, r.owner = 'L', worker
  write(id, r)
  redis.call('ZADD', LEASES, whole(now_ms() + tonumber(ARGV[2])), id)
  redis.call('EXPIRE', LEASES, {KEEP_QUEUE_S})
  local reply = {{'job', id, r.line, r.entry, whole(r.attempt), r.gateway, deliveries(stream, r.entry),
    redis.call('HGET', RESUMES, id) or envelope or ''}}
  for _, t in ipairs(redis.call('ZRANGE', READY_I, 0, 2)) do reply[#reply + 1] = 'interactive/' .. t end
  for _, t in ipairs(redis.call('ZRANGE', READY_B, 0, 1)) do reply[#reply + 1] = 'batch/' .. t end
  return reply
end

local id = redis.call('LINDEX', RETURNED, 0)
while id do
  local r = read(id)
  if r and r.state == 'R' then
    local stream = streams[r.line]
    if not stream then return {{'need', r.line}} end
    redis.call('LPOP', RETURNED)
    ensure_group(stream)
    redis.call('XCLAIM', stream, GROUP, worker, 0, r.entry, 'FORCE')
    return hand_out(id, r, stream)
  end
  redis.call('LPOP', RETURNED)
  id = redis.call('LINDEX', RETURNED, 0)
end

local classes = {{{{'interactive', READY_I}}, {{'batch', READY_B}}}}
local pulls = tonumber(redis.call('HGET', FAIR, 'pulls') or 0)
if pulls % {BATCH_EVERY} == {BATCH_EVERY} - 1 then classes = {{classes[2], classes[1]}} end
for _, class in ipairs(classes) do
  local tenant = redis.call('ZRANGE', class[2], 0, 0)[1]
  while tenant do
    local line = class[1] .. '/' .. tenant
    local stream = streams[line]
    if not stream then return {{'need', line}} end
    local found = redis.pcall('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
    if found and found.err then
      -- The group was destroyed: made anew, it reads from the beginning, what is in hand already included.
      found = ensure_group(stream)
        and redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
    end
    if not found then
      redis.call('ZREM', class[2], tenant)
    else
      local entry, fields = found[1][2][1][1], {{}}
      local flat = found[1][2][1][2]
      for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
      local r = fields.id and read(fields.id)
      if not r or r.entry ~= entry or r.line ~= line then
        return {{'stray', fields.id or '', line, entry, fields.gw or '', fields.job or ''}}
      end
      if r.state == 'W' then
        redis.call('HSET', FAIR, 'pulls', pulls + 1)
        charge(tenant, r.charge)
        unwait(line, r.charge)
        return hand_out(fields.id, r, stream, fields.job)
      end
      assign(stream, entry, r.state == 'L' and r.owner or NOBODY)
    end
    tenant = redis.call('ZRANGE', class[2], 0, 0)[1]
  end
end
redis.call('DEL', BELL)
return {{'none'}}
""")

RENEW = script("""
-- A worker is at its jobs. What isn't its own any more stays as it is.
-- ARGV worker, lease ms, (id, attempt)...   -> ids of the jobs that were lost
allow_when_full()
local lost, till = {}, whole(now_ms() + tonumber(ARGV[2]))
for i = 3, #ARGV, 2 do
  if is_ours(read(ARGV[i]), ARGV[1], ARGV[i + 1]) then
    redis.call('ZADD', LEASES, till, ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
""")

PUBLISH = script("""
-- Replies to one gateway, in one entry: only those of jobs that this worker holds in this attempt. A terminal one ends its job.
-- KEYS ..., replies, streams of ending jobs
-- ARGV worker, (id, attempt, payload, number of its stream or 0, cost, output tokens)...   -> for each 0 sent, 1 stale, 2 no such gateway
allow_when_full()
local entry, verdicts, ending = {}, {}, {}
for i = 2, #ARGV, 6 do
  local id, r = ARGV[i], read(ARGV[i])
  if is_ours(r, ARGV[1], ARGV[i + 1]) then
    entry[#entry + 1] = id
    entry[#entry + 1] = ARGV[i + 2]
    verdicts[#verdicts + 1] = 0
    if ARGV[i + 3] ~= '0' then ending[#ending + 1] = {id, r, KEYS[12 + tonumber(ARGV[i + 3])], i} end
  else
    verdicts[#verdicts + 1] = 1
  end
end
if #entry > 0 and not redis.call('XADD', KEYS[12], 'NOMKSTREAM', '*', unpack(entry)) then
  for i, verdict in ipairs(verdicts) do if verdict == 0 then verdicts[i] = 2 end end
end
for _, job in ipairs(ending) do
  settle(job[2], tonumber(ARGV[job[4] + 4]), tonumber(ARGV[job[4] + 5]))
  drop(job[1], job[2], job[3])
end
return verdicts
""")

RELEASE = script("""
-- A worker that leaves hands its jobs over: their gateways continue them elsewhere. That doesn't count as a delivery.
-- KEYS ..., streams   ARGV worker, (id, attempt, number of its stream)...   -> how many were its own
allow_when_full()
local released = 0
for i = 2, #ARGV, 3 do
  local id, r = ARGV[i], read(ARGV[i])
  if is_ours(r, ARGV[1], ARGV[i + 1]) then
    local stream = KEYS[11 + tonumber(ARGV[i + 2])]
    ensure_group(stream)
    assign(stream, r.entry, NOBODY, math.max(deliveries(stream, r.entry) - 1, 0))
    r.state, r.owner = 'H', ''
    write(id, r)
    redis.call('ZADD', LEASES, whole(now_ms()), id)
    released = released + 1
  end
end
return released
""")

EXPIRED = script("""
-- Jobs whose lease has been over for some time.   ARGV milliseconds, most   -> id, gateway, line, id, ...
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', whole(now_ms() - tonumber(ARGV[1])), 'LIMIT', 0, ARGV[2])) do
  local r = read(id)
  if r then
    found[#found + 1] = id
    found[#found + 1] = r.gateway
    found[#found + 1] = r.line
  end
end
return found
""")

RESUME = script(f"""
-- A gateway continues a job that nobody holds any more; with force whoever holds it. The attempt before this can't write from here on.
-- KEYS ..., stream   ARGV id, its attempt so far, envelope of the next, force
-- -> resumed | held (its worker is at it) | waiting (nobody has begun) | stale | gone
allow_when_full()
local id, r, force = ARGV[1], read(ARGV[1]), ARGV[4] == '1'
if not r then return 'gone' end
if r.attempt ~= tonumber(ARGV[2]) then
  -- Sent twice, since the answer got lost.
  return redis.call('HGET', RESUMES, id) == ARGV[3] and 'resumed' or 'stale'
end
if force and #redis.call('XRANGE', KEYS[12], r.entry, r.entry) == 0 then
  drop(id, r, KEYS[12])
  return 'gone'
end
if r.state == 'W' or r.state == 'R' then return 'waiting' end
local till = tonumber(redis.call('ZSCORE', LEASES, id) or 0)
if till > now_ms() and not force then return 'held' end
assign(KEYS[12], r.entry, NOBODY)
r.state, r.owner, r.attempt = 'R', '', r.attempt + 1
write(id, r)
redis.call('HSET', RESUMES, id, ARGV[3])
redis.call('ZREM', LEASES, id)
redis.call('RPUSH', RETURNED, id)
redis.call('EXPIRE', RESUMES, {KEEP_QUEUE_S})
redis.call('EXPIRE', RETURNED, {KEEP_QUEUE_S})
ring()
return 'resumed'
""")

CANCEL = script("""
-- Take a job back: at once if no worker is at it, else by telling the workers.
-- KEYS ..., stream, cancels   ARGV id   -> dropped | sent | gone
allow_when_full()
local id, r = ARGV[1], read(ARGV[1])
if not r then return 'gone' end
if r.state ~= 'L' or tonumber(redis.call('ZSCORE', LEASES, id) or 0) <= now_ms() then
  drop(id, r, KEYS[12])
  return 'dropped'
end
redis.call('XADD', KEYS[13], 'MINID', '~', whole(now_ms() - 60000), '*', 'c', id)
redis.call('EXPIRE', KEYS[13], 120)
return 'sent'
""")

ABANDON = script("""
-- Forget a job that no worker holds and nobody waits for. A gateway says so of its own, a worker only of those of a gateway that's gone.
-- KEYS ..., stream, replies   ARGV id, '1' if the gateway must be gone   -> 1 if it was forgotten
allow_when_full()
local r = read(ARGV[1])
if not r or (r.state == 'L' and tonumber(redis.call('ZSCORE', LEASES, ARGV[1]) or 0) > now_ms()) then return 0 end
if ARGV[2] == '1' and redis.call('EXISTS', KEYS[13]) == 1 then return 0 end
drop(ARGV[1], r, KEYS[12])
return 1
""")

BURY = script(f"""
-- Give a job up: it's kept among the dead, and whoever may wait for it is told.
-- KEYS ..., stream, dead, replies   ARGV id, worker, line, entry, gateway, reason, deliveries, envelope, payload   -> 1 if it was this worker's
allow_when_full()
local id, r = ARGV[1], read(ARGV[1])
if r and r.entry == ARGV[4] and not (r.state == 'L' and r.owner == ARGV[2]) then return 0 end
redis.call('XADD', KEYS[13], 'MAXLEN', '~', {MAX_DEAD}, '*', 'id', id, 'line', ARGV[3], 'gw', ARGV[5], 'reason', ARGV[6],
  'deliveries', ARGV[7], 'worker', ARGV[2], 'job', ARGV[8])
redis.call('EXPIRE', KEYS[13], {KEEP_DEAD_S})
if id ~= '' then redis.call('XADD', KEYS[14], 'NOMKSTREAM', '*', id, ARGV[9]) end
if r and r.entry == ARGV[4] then
  drop(id, r, KEYS[12])
else
  redis.call('XACK', KEYS[12], GROUP, ARGV[4])
  redis.call('XDEL', KEYS[12], ARGV[4])
  if redis.call('XLEN', KEYS[12]) == 0 then
    redis.call('DEL', KEYS[12])
    redis.call('SREM', LINES, ARGV[3])
  end
end
return 1
""")

LOST = script("""
-- Which of these jobs Redis doesn't have (any more).   KEYS ..., the stream of each   ARGV id...   -> ids
local lost = {}
for i, id in ipairs(ARGV) do
  local r = read(id)
  if not r or (r.state == 'W' and #redis.call('XRANGE', KEYS[11 + i], r.entry, r.entry) == 0) then lost[#lost + 1] = id end
end
return lost
""")
