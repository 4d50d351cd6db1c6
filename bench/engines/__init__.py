"""Engines as processes: one module for each, all timed by the same loop. They are imported by the Python of their engine, not by ours.

Read in this order: `serve` (the protocol, and the only clock), `ours`, `llamacpp`, `openvino`, `vllm`.
"""
