"""Every Lua script: the steps that must be one.

Each states its KEYS, ARGV and result. All keys of one call share a hash tag. Time is Redis' own, so that clocks of machines do not matter.
"""

SUBMIT = """
-- Put a job on its model's stream, unless the queue is full or nobody serves the model.
-- KEYS jobs, workers   ARGV envelope, max_waiting   -> entry id | 'full' | 'no_worker'
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
if redis.call('ZCOUNT', KEYS[2], now, '+inf') == 0 then return 'no_worker' end
local waiting = 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  waiting = redis.call('XLEN', KEYS[1]) - redis.call('XPENDING', KEYS[1], 'workers')[1]
end
if waiting >= tonumber(ARGV[2]) then return 'full' end
return redis.call('XADD', KEYS[1], '*', 'job', ARGV[1])
"""

CANCEL = """
-- Take a job back: from the queue if no worker has it yet, else by telling the workers.
-- KEYS jobs, cancels   ARGV entry id, request id   -> 'queued' | 'sent' | 'gone'
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
if #entry == 0 then return 'gone' end
if #redis.call('XPENDING', KEYS[1], 'workers', ARGV[1], ARGV[1], 1) == 0 then
  redis.call('XDEL', KEYS[1], ARGV[1])
  return 'queued'
end
local t = redis.call('TIME')
redis.call('XADD', KEYS[2], 'MINID', '~', (t[1] - 60) * 1000, '*', 'c', ARGV[2])
redis.call('EXPIRE', KEYS[2], 120)
return 'sent'
"""

FINISH = """
-- A request has ended: forget its job.
-- KEYS jobs   ARGV entry id...   -> number of entries deleted
redis.call('XACK', KEYS[1], 'workers', unpack(ARGV))
return redis.call('XDEL', KEYS[1], unpack(ARGV))
"""

HEARTBEAT = """
-- A worker is alive and its engine moves.
-- KEYS workers, worker, card   ARGV worker id, status, ttl_ms   -> 1, or 0 if the card has expired and must be written again
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3] * 10)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return redis.call('PEXPIRE', KEYS[3], ARGV[3] * 10)
"""

LIVE_WORKERS = """
-- KEYS workers   -> ids of the workers alive now
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
"""

ANNOUNCE_MODEL = """
-- KEYS models   ARGV model, ttl_ms   -> 1
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
return 1
"""

LIVE_MODELS = """
-- KEYS models   -> names of the models served now
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
"""

OPEN_REPLIES = """
-- Create a gateway's empty reply stream, or keep the one it has, and renew its life.
-- KEYS replies   ARGV ttl_ms   -> 1 if it was created
local made = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'r', ''))
  made = 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return made
"""
