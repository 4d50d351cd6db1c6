"""The engine process: takes jobs from Redis, runs the model, sends tokens back.

Reading order: `process` (composition) with `settings`, `errors` and `redis_link`, `consumer` (Redis to engine), `engine_thread`, `engine` (a step is:
schedule, execute, commit), `scheduler`, `fairness`, `sequence`, `cache/` (pages and prefixes), `executor` (what computes a step), `integrity`, `model_executor` with
`batch`, `model/` and `sampling/`, `text/`, `outgoing` and `publisher` (engine to Redis), `spans`, `heartbeat`, `reaper`; `prepared`, `model_engine` and
`synthetic/` make engines.
"""
