"""The engine process: takes jobs from Redis, runs the model, sends tokens back.

Reading order: `process` (composition) with `settings`, `errors` and `redis_link`, `consumer` (Redis to engine), `engine_thread`, `engine` (a step is:
schedule, execute, sample, commit), `scheduler`, `fairness`, `sequence`, `batch`, `cache/` (pages and prefixes), `model/`, `sampling/`, `text/`, `outgoing`
and `publisher` (engine to Redis), `spans`, `heartbeat`, `reaper`.
"""
