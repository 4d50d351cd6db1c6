"""`sluicegate plan`: what a model needs and what a set of GPUs gives, by arithmetic from its config.json alone. No torch, no weights.

Reading order: `shape` (the numbers that decide sizes), `read_config` (config.json to shape) with `known_models` (configs by name), `parts` (every tensor
of a checkpoint), `precision` (bytes of a tensor in a format; which tensors get which), `cards` (GPUs), `capacity` (what fits, how fast at best, at what
price), `advice` (what would fit), then `report` (text and JSON), `picture`, `flags` and `command`.
"""
