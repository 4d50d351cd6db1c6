"""The engine process: takes jobs from Redis, runs the model, sends tokens back.

Reading order: `process` (composition), `consumer` (Redis to engine), `engine_thread`, `engine` (step: schedule, execute,
sample, commit), `scheduler`, `fairness`, `sequence`, `batch`, `cache/` (pages and prefixes), `model/`, `sampling/`, `text/`, `publisher` (engine
to Redis), `heartbeat`, `reaper`.
"""
