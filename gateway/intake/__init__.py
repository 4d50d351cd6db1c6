"""From a request's body to a typed, immutable call with tokens. All of it runs in a process of its own, so that neither a body of many
megabytes nor a chat template that loops can hold up the event loop: the process is killed when it exceeds its time.

Reading order: `call` (the result), `field_table` (every field, its type and range), `fields` (checked access to JSON), `sampling_fields`, `chat_body`, `completion_body`, `control_text` (user text
can't become control tokens), `template`, `encoder`, `build` (all of it together), `wire`, `child` (the process), `pool` (the gateway's side).
"""
