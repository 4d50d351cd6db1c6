"""The Lua scripts of a model's queue: each is one step of a job's life, and nothing happens to a job outside them. SUBMIT and PULL, which choose,
have files of their own: `submit_script`, `pull_script`.

KEYS of every script begin with the fixed keys of the queue, in the order of `QueueKeys`; what follows is stated at each. All carry the model's
hash tag, and no script touches a key that isn't among its KEYS. Time is Redis' own. `docs/queue.md` has the table of states.

A job's record is `state|owner|attempt|charge|line|entry|gateway`. States: W waits in its line (its owner is the worker that should have it, if there's
one), L leased to its owner, H handed over (nobody has it, its gateway is to continue it), R returned (continued by its gateway, served before all
lines).
"""

from protocol.queue_lua import KEEP_DEAD_S, KEEP_QUEUE_S, MAX_DEAD, script

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
    if ARGV[i + 3] ~= '0' then ending[#ending + 1] = {id, r, KEYS[FIXED + 1 + tonumber(ARGV[i + 3])], i} end
  else
    verdicts[#verdicts + 1] = 1
  end
end
if #entry > 0 and not redis.call('XADD', KEYS[FIXED + 1], 'NOMKSTREAM', '*', unpack(entry)) then
  for i, verdict in ipairs(verdicts) do if verdict == 0 then verdicts[i] = 2 end end
end
if #ending > 0 then
  local told = tonumber(redis.call('ZSCORE', ROOM, ARGV[1]) or 0)
  if told % 1000 >= #ending then redis.call('ZADD', ROOM, 'XX', whole(told - #ending), ARGV[1]) end
end
for _, job in ipairs(ending) do
  settle(job[2], tonumber(ARGV[job[4] + 4]), tonumber(ARGV[job[4] + 5]))
  drop(job[1], job[2], job[3])
end
return verdicts
""")

RELEASE = script("""
-- A worker that leaves hands its jobs over: their gateways continue them elsewhere. That doesn't count as a delivery, unless one of them may be
-- why it leaves.
-- KEYS ..., streams   ARGV worker, 1 if it counts, (id, attempt, number of its stream)...   -> how many were its own
allow_when_full()
local released, taken_back = 0, ARGV[2] == '1' and 0 or 1
for i = 3, #ARGV, 3 do
  local id, r = ARGV[i], read(ARGV[i])
  if is_ours(r, ARGV[1], ARGV[i + 1]) then
    local stream = KEYS[FIXED + tonumber(ARGV[i + 2])]
    ensure_group(stream)
    assign(stream, r.entry, NOBODY, math.max(deliveries(stream, r.entry) - taken_back, 0))
    r.state, r.owner = 'H', ''
    write(id, r)
    redis.call('ZADD', LEASES, whole(now_ms()), id)
    released = released + 1
  end
end
return released
""")

EXPIRED = script("""
-- Jobs whose lease has been over for some time; only those of one gateway if it's named, so that what a dead one left doesn't hide them.
-- ARGV milliseconds, most, gateway or ''   -> id, gateway, line, id, ...
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', whole(now_ms() - tonumber(ARGV[1])))) do
  local r = #found < 3 * tonumber(ARGV[2]) and read(id)
  if r and (ARGV[3] == '' or ARGV[3] == r.gateway) then
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
if force and #redis.call('XRANGE', KEYS[FIXED + 1], r.entry, r.entry) == 0 then
  drop(id, r, KEYS[FIXED + 1])
  return 'gone'
end
if r.state == 'W' or r.state == 'R' then return 'waiting' end
local till = tonumber(redis.call('ZSCORE', LEASES, id) or 0)
if till > now_ms() and not force then return 'held' end
assign(KEYS[FIXED + 1], r.entry, NOBODY)
r.state, r.owner, r.attempt = 'R', '', r.attempt + 1
write(id, r)
redis.call('HSET', RESUMES, id, ARGV[3])
redis.call('ZREM', LEASES, id)
redis.call('RPUSH', RETURNED, id)
redis.call('EXPIRE', RESUMES, {KEEP_QUEUE_S})
redis.call('EXPIRE', RETURNED, {KEEP_QUEUE_S})
ring(BELL)
return 'resumed'
""")

CANCEL = script("""
-- Take a job back: at once if no worker is at it, else by telling the workers.
-- KEYS ..., stream, cancels   ARGV id   -> dropped | sent | gone
allow_when_full()
local id, r = ARGV[1], read(ARGV[1])
if not r then return 'gone' end
if r.state ~= 'L' or tonumber(redis.call('ZSCORE', LEASES, id) or 0) <= now_ms() then
  drop(id, r, KEYS[FIXED + 1])
  return 'dropped'
end
redis.call('XADD', KEYS[FIXED + 2], 'MINID', '~', whole(now_ms() - 60000), '*', 'c', id)
redis.call('EXPIRE', KEYS[FIXED + 2], 120)
return 'sent'
""")

ABANDON = script("""
-- Forget a job that no worker holds and nobody waits for. A gateway says so of its own, a worker only of those of a gateway that's gone.
-- KEYS ..., stream, replies   ARGV id, '1' if the gateway must be gone   -> 1 if it was forgotten
allow_when_full()
local r = read(ARGV[1])
if not r or (r.state == 'L' and tonumber(redis.call('ZSCORE', LEASES, ARGV[1]) or 0) > now_ms()) then return 0 end
if ARGV[2] == '1' and redis.call('EXISTS', KEYS[FIXED + 2]) == 1 then return 0 end
drop(ARGV[1], r, KEYS[FIXED + 1])
return 1
""")

BURY = script(f"""
-- Give a job up: it's kept among the dead, and whoever may wait for it is told.
-- KEYS ..., stream, dead, replies   ARGV id, worker, line, entry, gateway, reason, deliveries, envelope, payload   -> 1 if it was this worker's
allow_when_full()
local id, r = ARGV[1], read(ARGV[1])
if r and r.entry == ARGV[4] and not (r.state == 'L' and r.owner == ARGV[2]) then return 0 end
redis.call('XADD', KEYS[FIXED + 2], 'MAXLEN', '~', {MAX_DEAD}, '*', 'id', id, 'line', ARGV[3], 'gw', ARGV[5], 'reason', ARGV[6],
  'deliveries', ARGV[7], 'worker', ARGV[2], 'job', ARGV[8])
redis.call('EXPIRE', KEYS[FIXED + 2], {KEEP_DEAD_S})
if id ~= '' then redis.call('XADD', KEYS[FIXED + 3], 'NOMKSTREAM', '*', id, ARGV[9]) end
if r and r.entry == ARGV[4] then
  drop(id, r, KEYS[FIXED + 1])
else
  redis.call('XACK', KEYS[FIXED + 1], GROUP, ARGV[4])
  redis.call('XDEL', KEYS[FIXED + 1], ARGV[4])
  if redis.call('XLEN', KEYS[FIXED + 1]) == 0 then
    redis.call('DEL', KEYS[FIXED + 1])
    redis.call('SREM', LINES, ARGV[3])
  end
end
return 1
""")

RING = script("""
-- Let any worker look.
allow_when_full()
ring(BELL)
return 1
""")

LOST = script("""
-- Which of these jobs Redis doesn't have (any more).   KEYS ..., the stream of each   ARGV id...   -> ids
local lost = {}
for i, id in ipairs(ARGV) do
  local r = read(id)
  if not r or (r.state == 'W' and #redis.call('XRANGE', KEYS[FIXED + i], r.entry, r.entry) == 0) then lost[#lost + 1] = id end
end
return lost
""")
