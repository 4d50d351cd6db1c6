"""Rows with the options that a test names, all others neutral."""

from collections.abc import Callable, Sequence

import pytest

from protocol.job import SamplingParams
from worker.sampling import SamplerRow

MakeRow = Callable[..., SamplerRow]


@pytest.fixture(scope="session")
def make_row() -> MakeRow:
    """A function of any field of SamplingParams, and of sample index, prompt, output, eos ids and vocabulary size."""

    def make(
        *,
        index: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        eos: frozenset[int] = frozenset(),
        vocab_size: int = 8,
        **fields: object,
    ) -> SamplerRow:
        params = SamplingParams(**{"max_tokens": 1000, "seed": 7, "temperature": 0.0, **fields})
        row = SamplerRow(params, index=index, prompt_token_ids=prompt, eos_token_ids=eos, vocab_size=vocab_size)
        for token_id in output:
            row.observe(token_id)
        return row

    return make
