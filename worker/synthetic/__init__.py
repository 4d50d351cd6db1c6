"""A model that is only played: deterministic text at set rates, for rehearsals and for tests at the size of a fleet. No torch.

Queue, scheduler, pages, sampler and text are the real ones; only the forward pass is not there.

Reading order: `vocabulary` (its tokens), `script` (which token comes where), `executor` (steps that take the time they are told to),
`engine` (from settings to an engine).
"""
