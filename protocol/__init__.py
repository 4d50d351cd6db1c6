"""What crosses Redis: messages, their codec, every key name, every Lua script. No I/O.

Reading order: `ids`, `errors`, `codec` (typed msgpack), `job` (gateway to worker), `signing`, `replies` (worker to
gateway), `model_card` (what a worker tells of itself), `limits` and `tenancy` (tenants and API keys), `usage` and `audit` (what is written of requests and
events), `faults` (damage on demand),
`redis_url` (clusters), `key_space` (key names), `routing` (digests of prefixes),
`queue_lua`, `submit_script`, `pull_script` and `queue_scripts` (Lua of the queue), `scripts` (Lua about who is there), `account_scripts` (Lua of limits), `link_state` (whether Redis answers).
"""
