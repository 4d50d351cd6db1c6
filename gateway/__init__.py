"""HTTP. Tenants, an OpenAI-compatible API, SSE. Knows no torch and no GPU, and needs no model files.

Reading order, along a request: `app` (composition), `auth` and `tenant_store`, `intake/` (body to typed call and tokens, in a process of its
own), `model_directory`, `generation` (jobs out, replies in), `submitter`, `reply_reader`, `liveness`, then `chat` and `completions` (the routes) with
`chat_shapes` and `completion_shapes`, `sse`. Beside it: `errors`, `models`, `health`, `metrics`, `admin`, `usage`.
"""
