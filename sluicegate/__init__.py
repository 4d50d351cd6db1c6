"""The `sluicegate` command: composes the processes, holds no serving logic of its own.

Reading order: `command` (arguments and dispatch), `errors`, `environment` (folders and shared settings), `secrets`, `logs`, `model_store`, `stack` (up and
down) with `stack_settings`, `supervisor`, `child` and `valkey`, `processes` (gateway and worker), `tenants`,
`api_keys`, `prices`, `shares` and `usage` over `redis_access` with `tenancy_flags`, `allowances` and `tenant_seed`, then `queue`, `models`, `chat`, `faults`, `doctor`, `bench`,
`fleet` (processes that do as they're told, for measurements and tests) with `queue_setting`.
"""

__version__ = "0.1.0"
