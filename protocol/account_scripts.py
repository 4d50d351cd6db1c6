"""Lua scripts of tenants' accounts: admission against all limits at once, settlement, leases. Time is Redis' own.

A request that's admitted takes *charges*, each `[kind, limit, amount, period, members]` over a key of its own:

window   a hash, second -> amount, with its sum: what was used in this second and the 60 before it. Any 60 seconds are covered, so there
         is no edge at which twice the limit fits
lease    a sorted set of members with the time until which each is held: nothing in it can stay locked
budget   a hash with the current period (day or month, UTC) and what was used in it

Either all charges fit and all are taken, or none is. What was taken is kept with the request until it's settled, once, with the true amounts.
All keys of a call belong to one tenant and share a hash tag. Maps and lists are msgpack.
"""

_TIME = """
local t = redis.call('TIME'); local second = tonumber(t[1]); local now = second * 1000 + math.floor(t[2] / 1000)
"""

_CHARGES = (
    _TIME
    + """
local KEPT = 60
local function window_sum(key)
  local state = redis.call('HMGET', key, 'oldest', 'sum')
  if not state[1] then return 0 end
  local oldest, sum = tonumber(state[1]), tonumber(state[2])
  if oldest >= second - KEPT then return sum end
  for s = oldest, second - KEPT - 1 do
    local amount = redis.call('HGET', key, s)
    if amount then sum = sum - amount; redis.call('HDEL', key, s) end
  end
  redis.call('HSET', key, 'oldest', second - KEPT, 'sum', sum)
  return sum
end
local function window_wait(key, sum, limit, amount)
  for s = second - KEPT, second do
    sum = sum - (redis.call('HGET', key, s) or 0)
    if sum + amount <= limit then return s + KEPT + 1 - second end
  end
  return KEPT + 1
end
local function window_take(key, amount)
  local oldest = redis.call('HGET', key, 'oldest')
  -- It is later if the clock was set back. What is before it would never be taken off the sum.
  if not oldest or tonumber(oldest) > second then redis.call('HSET', key, 'oldest', second) end
  redis.call('HINCRBY', key, second, amount)
  redis.call('HINCRBY', key, 'sum', amount)
  redis.call('HSET', key, 'newest', second)
  redis.call('EXPIRE', key, 130)
end
-- The month of a day since 1970, as year * 12 + month (Howard Hinnant, chrono-compatible low-level date algorithms).
local function month_of(day)
  local z = day + 719468; local era = math.floor(z / 146097); local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  return (yoe + era * 400) * 12 + mp + 3
end
local today = math.floor(second / 86400)
local function period_now(period)
  if period == 'day' then return today end
  return month_of(today)
end
local function period_left(period)
  local day = today + 1
  if period == 'month' then
    local month = month_of(today)
    while month_of(day) == month do day = day + 1 end
  end
  return day * 86400 - second
end
local function budget_used(key, period)
  local state = redis.call('HMGET', key, 'period', 'used')
  if state[1] and tonumber(state[1]) == period_now(period) then return tonumber(state[2]) end
  return 0
end
local function used_of(charge, key)
  if charge[1] == 'window' then return window_sum(key) end
  if charge[1] == 'lease' then return redis.call('ZCOUNT', key, '(' .. t[1] .. string.format('%03d', math.floor(t[2] / 1000)), '+inf') end
  return budget_used(key, charge[4])
end
local function wait_of(charge, key, used)
  if charge[3] > charge[2] then return -1 end
  if charge[1] == 'window' then return window_wait(key, used, charge[2], charge[3]) end
  if charge[1] == 'lease' then return 1 end
  return period_left(charge[4])
end
local function reset_of(charge, key)
  if charge[1] == 'window' then
    local newest = redis.call('HGET', key, 'newest')
    if newest then return math.max(newest + KEPT + 1 - second, 0) end
    return 0
  end
  if charge[1] == 'budget' then return period_left(charge[4]) end
  return 0
end
"""
)

ADMIT = (
    _CHARGES
    + """
-- Take all charges of a request, or none.
-- KEYS open, leases, deleted, charge...   ARGV request, lease_ms, note, charges, is_dry (0 or 1)
-- -> [-1, now_ms] if the tenant was deleted | [1, now_ms, (used, reset_s) of each charge] | [0, now_ms, (used, reset_s)..., number of the charge that was refused, wait_s or -1]
-- as msgpack: one string is read faster than many numbers. A dry run takes nothing and refuses nothing.
if redis.call('EXISTS', KEYS[3]) == 1 then return cmsgpack.pack({-1, now}) end
local charges, is_dry = cmsgpack.unpack(ARGV[4]), ARGV[5] == '1'
local refused, refused_wait, used = 0, 0, {}
for i, charge in ipairs(charges) do
  local key = KEYS[i + 3]
  used[i] = used_of(charge, key)
  if not is_dry and used[i] + charge[3] > charge[2] then
    local wait = wait_of(charge, key, used[i])
    if refused == 0 or wait == -1 or (refused_wait ~= -1 and wait > refused_wait) then refused, refused_wait = i, wait end
  end
end
if refused == 0 and not is_dry then
  local kept, keys = {}, {}
  for i, charge in ipairs(charges) do
    local key, period = KEYS[i + 3], 0
    if charge[1] == 'window' then
      window_take(key, charge[3])
    elseif charge[1] == 'lease' then
      for _, member in ipairs(charge[5]) do redis.call('ZADD', key, now + ARGV[2], member) end
      redis.call('PEXPIRE', key, ARGV[2] * 10)
    else
      period = period_now(charge[4])
      redis.call('HSET', key, 'period', period, 'used', used[i] + charge[3])
      redis.call('EXPIRE', key, 32 * 86400)
    end
    used[i] = used[i] + charge[3]
    kept[i] = {charge[1], charge[3], period, charge[5]}
    keys[i] = key
  end
  redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({now, second, ARGV[3], kept, keys}))
  redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1])
end
local reply = {refused == 0 and 1 or 0, now}
for i, charge in ipairs(charges) do
  reply[#reply + 1] = used[i]
  reply[#reply + 1] = reset_of(charge, KEYS[i + 3])
end
if refused > 0 then
  reply[#reply + 1] = refused
  reply[#reply + 1] = refused_wait
end
return cmsgpack.pack(reply)
"""
)

SETTLE = (
    _TIME
    + """
-- A request has ended: give back what it took beyond the true amounts, and write its row and its sums. Harmless the second time.
-- KEYS open, leases, progress, rows, totals, hours, days, charge...
-- ARGV request, is_only_if_expired (0 or 1), true amounts by charge, row fields (none: no row), totals, hour sums, day sums (each
--      name, amount, name, amount...), rows' life (ms), hours' life (s), days' life (s)
-- -> 1, or 0 if it is settled already (or was never admitted, or its lease still runs)
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return 0 end
if ARGV[2] == '1' and tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or 0) > now then return 0 end
local record, amounts = cmsgpack.unpack(raw), cmsgpack.unpack(ARGV[3])
for i, charge in ipairs(record[4]) do
  local key, change = KEYS[i + 7], amounts[i] - charge[2]
  if charge[1] == 'window' then
    if change ~= 0 and redis.call('HEXISTS', key, record[2]) == 1 then
      redis.call('HINCRBY', key, record[2], change)
      redis.call('HINCRBY', key, 'sum', change)
    end
  elseif charge[1] == 'lease' then
    for _, member in ipairs(charge[4]) do redis.call('ZREM', key, member) end
  elseif tonumber(redis.call('HGET', key, 'period') or -1) == charge[3] then
    redis.call('HINCRBY', key, 'used', change)
  end
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
local row = cmsgpack.unpack(ARGV[4])
if #row == 0 then return 1 end
redis.call('XADD', KEYS[4], 'MINID', '~', now - ARGV[8], '*', unpack(row))
redis.call('PEXPIRE', KEYS[4], ARGV[8])
for i, pairs in ipairs({cmsgpack.unpack(ARGV[5]), cmsgpack.unpack(ARGV[6]), cmsgpack.unpack(ARGV[7])}) do
  for place = 1, #pairs, 2 do redis.call('HINCRBY', KEYS[i + 4], pairs[place], pairs[place + 1]) end
end
redis.call('EXPIRE', KEYS[6], ARGV[9])
redis.call('EXPIRE', KEYS[7], ARGV[10])
return 1
"""
)

RENEW = (
    _TIME
    + """
-- Open requests are still at work.
-- KEYS open, leases, progress, other lease sets...   ARGV lease_ms, [[request, progress, [[number of the set, member...]...]]...]
-- -> number of requests renewed
local count = 0
for _, entry in ipairs(cmsgpack.unpack(ARGV[2])) do
  if redis.call('HEXISTS', KEYS[1], entry[1]) == 1 then
    count = count + 1
    redis.call('ZADD', KEYS[2], 'XX', now + ARGV[1], entry[1])
    redis.call('HSET', KEYS[3], entry[1], entry[2])
    for _, held in ipairs(entry[3]) do
      for place = 2, #held do redis.call('ZADD', KEYS[held[1] + 3], 'XX', now + ARGV[1], held[place]) end
      redis.call('PEXPIRE', KEYS[held[1] + 3], ARGV[1] * 10)
    end
  end
end
return count
"""
)

EXPIRED = (
    _TIME
    + """
-- Requests whose gateway has let their lease run out.
-- KEYS open, leases, progress   ARGV grace_ms, most   -> [request, record or false, progress or false]...
local found = {}
for _, request in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[2])) do
  local raw = redis.call('HGET', KEYS[1], request)
  if raw then
    found[#found + 1] = {request, raw, redis.call('HGET', KEYS[3], request)}
  else
    redis.call('ZREM', KEYS[2], request)
    redis.call('HDEL', KEYS[3], request)
  end
end
return found
"""
)

LOOK = (
    _TIME
    + """
-- KEYS revision   -> [revision, now_ms]
return {tonumber(redis.call('GET', KEYS[1]) or 0), now}
"""
)

CHANGE_RECORD = """
-- Change one sealed record, raise the revision, and write the audit entry, as one step.
-- KEYS hash, revision, audit, retired   ARGV field, mode, expected, value, retired member, most audit entries, audit field...
-- mode absent: only if there's none; same: only if it is still `expected`; present: only if there is one; any: in any case. An empty
-- value removes it; a member is added to the retired set unless it's empty   -> 1 | 0
local old = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[2] == 'absent' and old then return 0 end
if (ARGV[2] == 'same' or ARGV[2] == 'present') and not old then return 0 end
if ARGV[2] == 'same' and old ~= ARGV[3] then return 0 end
if ARGV[4] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[4]) end
if ARGV[5] ~= '' then redis.call('SADD', KEYS[4], ARGV[5]) end
redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*', unpack(ARGV, 7))
return 1
"""
