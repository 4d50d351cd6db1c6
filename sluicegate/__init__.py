"""The `sluicegate` command: composes the processes, holds no serving logic of its own.

Reading order: `command` (arguments and dispatch) with `argument_types`, `process_flags` and `gateway_flags`, `configuration` (flag, environment, file) with `config_page`,
`errors`, `environment` (folders and shared settings), `secrets`, `logs`, `tracing`, `model_store`, `stack` (up and down) with `stack_settings`, `supervisor`,
`child` and `valkey`, `processes` (gateway and worker), `tenants`, `api_keys`, `prices`, `shares` and `usage` over `redis_client` and `redis_access` with `tenancy_flags`,
`allowances` and `tenant_seed`, then `queue`, `models`, `chat`, `faults`, `doctor`, `plan/` (what fits on which GPUs), `quality_flags` with `quantize` and `quality`
(calibrate, eval), `bench` with `bench_flags`, `bench_gateway`,
`fleet` (processes that do as they're told, for measurements and tests) with `queue_setting`.
"""

__version__ = "0.1.0"
