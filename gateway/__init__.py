"""HTTP. Tenants, an OpenAI-compatible API, SSE. Knows no torch and no GPU, and needs no model files.

Reading order, along a request: `app` (composition) with `settings` and `parts`, `connection`, `middleware` with `framing`, `completions` (the two routes for
text), `auth` and `tenant_store`, `body`, `intake/` (body to typed call and tokens, in processes of its own), `model_directory`, `limits/` (admission,
settlement), `generation` (jobs out, replies in), `submitter`, `routing` (which worker is preferred), `mailbox`, `pending_job`, `reply_reader`, `reply_stream`, `lease_watch`, `liveness`, then `shapes` and
`token_text` (replies as JSON) and `sse`. Beside it: `errors` and `error_response`, `redis_link`, `redis_lane`, `scripts`, `memory`, `models`, `openapi` with `schema_parts`, `health`, `tracing`,
`metrics` with `worker_metrics`. What an operator sets: `records` (sealed, audited), `tenant_store`, `price_store`, `share_store` (`share_book` as requests see it), `tenancy_json`; seen by
running gateways through `tenancy_watch` and `access_guard`; `admin/` is its API. What was used: `usage_store`, `usage_view`, `usage_routes`, `audit_log`.
"""
