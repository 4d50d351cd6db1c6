"""The engine process: takes jobs from Redis, runs the model, sends tokens back.

Reading order: `process` (composition) with `settings`, `errors` and `redis_link`, `job_queue` (the queue's scripts), `in_flight`, `consumer` (Redis
to engine), `leases`, `engine_thread`, `engine` (a step is: schedule, execute, commit), `scheduler`, `fairness`, `sequence`, `resume`, `cache/`
(pages and prefixes), `integrity` (what is done about damaged pages) with `scrub_pace`, `executor` (what computes a step), `model_executor` with `batch`, `sealing`, `seal_keeper`, `device_errors`, `model/` and `sampling/`, `text/`, `outgoing` and `publisher`
(engine to Redis), `prefix_publisher` (what the cache holds, for gateways to choose by), `spans`, `heartbeat`, `reaper`, `audit_writer`; `fault_control` and `faults` (damage on demand); `kv_scales` (of an FP8 cache), `prepared`, `model_engine` and
`synthetic/` make engines. `quantize/` makes models smaller.
"""
