"""What crosses Redis: messages, their codec, every key name, every Lua script. No I/O.

Reading order: `ids`, `errors`, `codec` (typed msgpack), `job` (gateway to worker), `signing`, `replies` (worker to
gateway), `model_card` (what a worker tells of itself), `tenancy` (tenants and API keys), `redis_url` (clusters), `key_space` (key names), `scripts` (Lua).
"""
