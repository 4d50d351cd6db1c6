"""What the queue's scripts share: reading and writing a job's record, counting, and forgetting a job. See `queue_scripts`."""

import hashlib
from dataclasses import dataclass, field, fields

from protocol.key_space import QueueKeys

OUTPUT_WEIGHT = 2  # an output token costs as much as two prompt tokens
FIRST_GUESS_TOKENS = 128  # how long answers are thought to be before one has been seen
MAX_RINGS = 128
MAX_DEAD = 1000
KEEP_DEAD_S = 7 * 24 * 3600
KEEP_PACE_S = 3600
KEEP_QUEUE_S = 2 * 3600  # longer than any request may take
KEEP_RINGS_S = 60
NUM_FIXED = len(fields(QueueKeys))
BATCH_EVERY = 16  # each time that so many jobs were pulled, the batch class goes first: it's never starved


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the digest by which Redis knows it once it has seen it."""

    text: str = field(repr=False)
    sha: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


PRELUDE = f"""
local LIVE, LEASES, RETURNED, RESUMES, FAIR, READY_I, READY_B, LOAD, PACE, LINES, BELL, WAITING, ROOM = unpack(KEYS, 1, {NUM_FIXED})
local FIXED, GROUP, NOBODY = {NUM_FIXED}, 'workers', '-'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function whole(x) return string.format('%.0f', x) end

local function read(id)
  local v = redis.call('HGET', LIVE, id)
  if not v then return nil end
  local r = {{}}
  r.state, r.owner, r.attempt, r.charge, r.line, r.entry, r.gateway = v:match('^(%u)|(.-)|(%d+)|(%d+)|(.-)|(.-)|(.*)$')
  r.attempt = tonumber(r.attempt)
  r.charge = tonumber(r.charge)
  return r
end

local function write(id, r)
  redis.call('HSET', LIVE, id,
    table.concat({{r.state, r.owner, whole(r.attempt), whole(r.charge), r.line, r.entry, r.gateway}}, '|'))
end

local function split(line)
  local class, tenant = line:match('^(.-)/(.*)$')
  return class == 'batch' and READY_B or READY_I, tenant
end

local function less(name, by)
  if redis.call('HINCRBY', LOAD, name, -by) <= 0 then redis.call('HDEL', LOAD, name) end
end

-- A waiting job among the others, by line and age. Its owner is the worker that should have it, if there's one.
local function place_of(id, r)
  local ms, number = r.entry:match('^(%d+)-(%d+)$')
  return string.format('%s %s-%06d %s %s', r.line, ms, number, id, r.owner)
end

-- A job of a line doesn't wait any more.
local function unwait(id, r)
  local ready, tenant = split(r.line)
  redis.call('ZREM', WAITING, place_of(id, r))
  less('n', 1); less('t', r.charge); less('n:' .. tenant, 1); less('t:' .. tenant, r.charge)
  local left = redis.call('HINCRBY', LOAD, 'l:' .. r.line, -1)
  if left <= 0 then
    redis.call('HDEL', LOAD, 'l:' .. r.line)
    redis.call('ZREM', ready, tenant)
    redis.call('HSET', FAIR, 'floor', redis.call('HGET', FAIR, 'v:' .. tenant) or 0)
  end
end

-- Add to a tenant's virtual time: weighted tokens in thousandths, divided by its weight.
local function charge(tenant, tokens)
  local weight = tonumber(redis.call('HGET', FAIR, 'w:' .. tenant) or 1)
  local v = tonumber(redis.call('HGET', FAIR, 'v:' .. tenant) or 0) + math.floor(tokens * 1000 / weight)
  redis.call('HSET', FAIR, 'v:' .. tenant, whole(v))
  redis.call('ZADD', READY_I, 'XX', whole(v), tenant)
  redis.call('ZADD', READY_B, 'XX', whole(v), tenant)
end

-- Forget a job. The last one of a line takes its stream along, the last one of all the whole queue.
local function drop(id, r, stream)
  if r.state == 'W' then unwait(id, r) end
  less('e:' .. r.line, 1)
  redis.call('XACK', stream, GROUP, r.entry)
  redis.call('XDEL', stream, r.entry)
  redis.call('HDEL', LIVE, id)
  redis.call('ZREM', LEASES, id)
  redis.call('HDEL', RESUMES, id)
  if redis.call('XLEN', stream) == 0 then
    redis.call('DEL', stream)
    redis.call('SREM', LINES, r.line)
  end
  if redis.call('EXISTS', LIVE) == 0 then
    redis.call('DEL', RETURNED, RESUMES, FAIR, READY_I, READY_B, LOAD, LINES, WAITING)
  end
end

-- What was really used is counted instead of the guess, and remembered for the next guess and for Retry-After.
local function settle(r, cost, output)
  local _, tenant = split(r.line)
  charge(tenant, cost - r.charge)
  if output < 0 then return end
  local guess = tonumber(redis.call('HGET', PACE, 'output') or {FIRST_GUESS_TOKENS})
  local slot, at = math.floor(now_ms() / 5000), tonumber(redis.call('HGET', PACE, 'slot') or 0)
  if slot > at then
    local last = tonumber(redis.call('HGET', PACE, 'cost') or 0) / ((slot - at) * 5)
    local rate = tonumber(redis.call('HGET', PACE, 'rate') or last)
    if at > 0 then redis.call('HSET', PACE, 'rate', string.format('%.3f', (rate + last) / 2)) end
    redis.call('HSET', PACE, 'slot', slot, 'cost', 0)
  end
  redis.call('HSET', PACE, 'output', string.format('%.3f', guess + (output - guess) / 16))
  redis.call('HINCRBY', PACE, 'cost', cost)
  redis.call('EXPIRE', PACE, {KEEP_PACE_S})
end

local function ring(bell)
  if redis.call('LLEN', bell) < {MAX_RINGS} then redis.call('LPUSH', bell, 1) end
  redis.call('EXPIRE', bell, {KEEP_RINGS_S})
end

local function ensure_group(stream)
  local made = redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0')
  return not (type(made) == 'table' and made.err)
end

-- Put an entry into the hands of a consumer without counting it as a delivery, whoever had it, even if the group was destroyed.
local function assign(stream, entry, consumer, count)
  ensure_group(stream)
  if count then
    redis.call('XCLAIM', stream, GROUP, consumer, 0, entry, 'RETRYCOUNT', count, 'FORCE', 'JUSTID')
  else
    redis.call('XCLAIM', stream, GROUP, consumer, 0, entry, 'FORCE', 'JUSTID')
  end
end

local function deliveries(stream, entry)
  local pending = redis.call('XPENDING', stream, GROUP, entry, entry, 1)
  return #pending > 0 and pending[1][4] or 0
end

-- Once a script has written something, a full Redis doesn't refuse the rest of it: what runs may go on and end, and so make room.
local function allow_when_full() redis.call('LTRIM', BELL, 0, -1) end

local function is_ours(r, worker, attempt)
  return r ~= nil and r.state == 'L' and r.owner == worker and r.attempt == tonumber(attempt)
end
"""


def script(body: str) -> Script:
    """A script of a model's queue."""
    return Script(PRELUDE + body)
