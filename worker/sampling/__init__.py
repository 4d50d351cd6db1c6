"""From logits to tokens.

Reading order: `row` (one sequence's rules), `token_counts` (what they need to know of its history), `randomness`,
`sampler` (choosing), `selection` (top_k, top_p and the draw), `logprobs`.
"""

from worker.sampling.logprobs import prompt_logprobs
from worker.sampling.row import SamplerRow
from worker.sampling.sampler import NotFinite, Sampled, sample, sample_row

__all__ = ["NotFinite", "Sampled", "SamplerRow", "prompt_logprobs", "sample", "sample_row"]
