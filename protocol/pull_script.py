"""The script that hands out jobs: fair among tenants, and among one tenant's jobs with regard to who should have them.

Which tenant is served is decided by virtual time alone. A job that another worker should have is passed over only while that worker has room, for
HOLD_MS at most; within a line a job is overtaken only by jobs that came within OVERTAKE_MS after it. Nobody starves.
"""

from protocol.queue_lua import BATCH_EVERY, KEEP_QUEUE_S, script

HOLD_MS = 100  # how long a job is kept for a worker that has room and should have it
ROOM_MS = 1500  # how long a worker is believed to have room since it last said so
OVERTAKE_MS = 2000  # a job may be overtaken only by its tenant's jobs that came so soon after it
LOOK_AHEAD = 8  # jobs of a line, and tenants, that a pull looks at
MAX_BUSY = 999  # that is told

PULL = script(f"""
-- Hand the next job to a worker: one that was returned, else one of the tenant with the least virtual time. That's its oldest job, unless another
-- worker that has room should have that one, or one of the next few should go to this worker.
-- KEYS ..., the worker's bell, streams of some lines   ARGV worker, lease ms, jobs that it's at, how many it can take, the names of those lines
-- -> job, id, line, entry, attempt, gateway, deliveries, envelope, lines that are likely next...
--    | none, milliseconds after which to look again, 0 if nothing is kept for others
--    | need, line (call again with it) | stray, id, line, entry, gateway, envelope (an entry that nobody submitted)
allow_when_full()
local worker, busy, room, streams, now = ARGV[1], math.min(tonumber(ARGV[3]), {MAX_BUSY - 1}), tonumber(ARGV[4]), {{}}, now_ms()
for i = 5, #ARGV do streams[ARGV[i]] = KEYS[FIXED + i - 3] end

local function say_room(jobs)
  redis.call('ZADD', ROOM, whole((now + {ROOM_MS}) * 1000 + jobs), worker)
  redis.call('PEXPIRE', ROOM, {2 * ROOM_MS})
end

local function hand_out(id, r, count, envelope)
  r.state, r.owner = 'L', worker
  write(id, r)
  redis.call('ZADD', LEASES, whole(now + tonumber(ARGV[2])), id)
  redis.call('EXPIRE', LEASES, {KEEP_QUEUE_S})
  if room > 1 then
    say_room(busy + 1)
  elseif redis.call('ZREM', ROOM, worker) == 1 and redis.call('HEXISTS', LOAD, 'n') == 1 then
    ring(BELL) -- what was kept for this worker is anybody's from here on
  end
  local reply = {{'job', id, r.line, r.entry, whole(r.attempt), r.gateway, count, redis.call('HGET', RESUMES, id) or envelope or ''}}
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
    return hand_out(id, r, deliveries(stream, r.entry))
  end
  redis.call('LPOP', RETURNED)
  id = redis.call('LINDEX', RETURNED, 0)
end

local rooms, soonest = {{}}, nil
local function has_room(name)
  if rooms[name] == nil then
    local till = redis.call('ZSCORE', ROOM, name)
    rooms[name] = till ~= false and tonumber(till) >= now * 1000
  end
  return rooms[name]
end

-- The job of a line that this worker is to take, nil if all that were looked at are kept for others; and whether there is any.
local function candidate(line)
  local first, oldest = nil, nil
  for _, place in ipairs(redis.call('ZRANGE', WAITING, '[' .. line .. ' ', '(' .. line .. '!', 'BYLEX', 'LIMIT', 0, {LOOK_AHEAD})) do
    local ms, id, wanted = place:match('^%S+ (%d+)-%d+ (%S+) (%S*)$')
    ms = tonumber(ms)
    oldest = oldest or ms
    if wanted == worker and ms - oldest <= {OVERTAKE_MS} then return {{id, place}}, true end
    local left = math.min(ms + {HOLD_MS} - now, {HOLD_MS}) -- the clock may have gone back
    if not first and (wanted == '' or left <= 0 or not has_room(wanted)) then
      first = {{id, place}}
    elseif not first then
      soonest = math.min(soonest or left, left)
    end
  end
  return first, oldest ~= nil
end

local function fields_of(found)
  local fields, flat = {{}}, found[2]
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end

-- Somebody has written to the line by hand.
local function stray(line, stream)
  for _, found in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local fields = fields_of(found)
    local r = fields.id and read(fields.id)
    if not r or r.entry ~= found[1] or r.line ~= line then
      return {{'stray', fields.id or '', line, found[1], fields.gw or '', fields.job or ''}}
    end
  end
end

-- Its reply, or nil if that job doesn't wait any more.
local function take(line, tenant, job)
  local stream, id, r = streams[line], job[1], read(job[1])
  if not stream then return {{'need', line}} end
  local found = r and r.state == 'W' and r.line == line and redis.call('XRANGE', stream, r.entry, r.entry)[1]
  if not found then
    redis.call('ZREM', WAITING, job[2]) -- deleted by hand: its gateway finds out
    return nil
  end
  if redis.call('XLEN', stream) > tonumber(redis.call('HGET', LOAD, 'e:' .. line) or 0) then
    local reply = stray(line, stream)
    if reply then return reply end
  end
  redis.call('HINCRBY', FAIR, 'pulls', 1)
  charge(tenant, r.charge)
  unwait(id, r)
  local claimed = redis.pcall('XCLAIM', stream, GROUP, worker, 0, r.entry, 'RETRYCOUNT', 1, 'FORCE', 'JUSTID')
  if claimed.err then assign(stream, r.entry, worker, 1) end -- the group was destroyed
  return hand_out(id, r, 1, fields_of(found).job)
end

local classes = {{{{'interactive', READY_I}}, {{'batch', READY_B}}}}
local pulls = tonumber(redis.call('HGET', FAIR, 'pulls') or 0)
if pulls % {BATCH_EVERY} == {BATCH_EVERY} - 1 then classes = {{classes[2], classes[1]}} end
for _, class in ipairs(classes) do
  local rank = 0
  while rank < {LOOK_AHEAD} do
    local tenant = redis.call('ZRANGE', class[2], rank, rank)[1]
    if not tenant then break end
    local line = class[1] .. '/' .. tenant
    local job, is_any = candidate(line)
    if job then
      local reply = take(line, tenant, job)
      if reply then return reply end
    elseif is_any then
      rank = rank + 1
    else
      redis.call('ZREM', class[2], tenant)
    end
  end
end
say_room(busy)
redis.call('ZREMRANGEBYSCORE', ROOM, '-inf', whole(now * 1000))
redis.call('DEL', BELL, KEYS[FIXED + 1])
return {{'none', math.max(soonest or 0, 0)}}
""")
