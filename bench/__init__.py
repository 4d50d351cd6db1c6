"""Measurements that anybody can repeat. `docs/benchmarks.md` says how to run them and how to read what they print.

Read in this order: `rows` (what is measured), `contenders` (who takes part), `engines` (each engine as a process, and the clock), `process`
(our side of the protocol), `prompts`, `measure` (a run), `bandwidth`, `start` and `neighbours` (floor, real workers, other load), `results`, `goals`, `table`, `picture`,
and `run`, which joins them; `setup_peers` installs the peers. `kernels` times the products alone; `quality` compares with float32, whose
weights `float_weights` reads. `comparison`, `needle`, `evaluation` and `evaluation_picture` are what `sluicegate eval` measures, `streaming` what quantizing takes of memory. `admission` is what a gateway does between a key and the queue, `queue/` is what `sluicegate bench queue`
measures, `integrity` what checks of the KV cache cost a step and `sealed_attention` what they cost attention alone, `prefix_reuse` what a cached prefix saves; `load` how fast a checkpoint loads, also one that `synthetic_checkpoint` makes up; `gpu` with `gpu_cases`, `gpu_seal_cases` and `gpu_model` checks and times the kernels for GPUs, and a whole model on them.
"""
