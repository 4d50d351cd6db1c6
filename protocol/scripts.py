"""The Lua scripts about who is there: workers, models, gateways. Those of the queue are in `queue_scripts`.

Each states its KEYS, ARGV and result. All keys of one call share a hash tag. Time is Redis' own, so that clocks of machines do not matter.
"""

from protocol.queue_lua import Script

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
redis.call('PERSIST', KEYS[1]) -- having written, the script isn't refused by a full Redis
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'r', ''))
  made = 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return made
"""

HOLD_PREFIXES = Script("""
-- What a worker has in its cache has changed.
-- KEYS held   ARGV ttl_ms, is_whole (0 or 1), number of new digests, new digests..., gone digests...
-- -> 1, or 0 if the set has gone and must be written as a whole
redis.call('PERSIST', KEYS[1]) -- having written, the script isn't refused by a full Redis
if ARGV[2] == '1' then
  redis.call('DEL', KEYS[1])
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
local function each(command, first, last)
  for start = first, last, 1000 do redis.call(command, KEYS[1], unpack(ARGV, start, math.min(start + 999, last))) end
end
local last = 3 + tonumber(ARGV[3])
each('SADD', 4, last)
each('SREM', last + 1, #ARGV)
redis.call('SADD', KEYS[1], '-') -- it's there even if it holds nothing
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
""")
