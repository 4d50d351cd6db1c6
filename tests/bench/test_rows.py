"""The definition of rows, and prompts for them."""

import pytest

from bench.prompts import PromptSource
from bench.rows import SETS, Row, longest, most_tokens


@pytest.mark.parametrize("rows", SETS.values(), ids=SETS.keys())
def test_no_stream_ends_within_its_row(rows: tuple[Row, ...]) -> None:
    """Each stream may produce more tokens than all rounds ask for, or the last ones would run with fewer streams."""
    for row in rows:
        assert row.num_new > row.rounds * row.num_steps + 1
    assert len(rows) == len({row.name for row in rows})


def test_all_rows_fit_the_default_model() -> None:
    """It has a context of 8,192 tokens."""
    assert longest(SETS["full"]) <= 8192
    assert most_tokens(SETS["full"]) >= 32 * 128


def test_prompts_do_not_repeat() -> None:
    """No two prompts have a first page of tokens in common, even when the text has been used up."""
    source = PromptSource([n * n % 4093 for n in range(2000)])

    prompts = [prompt for _ in range(12) for prompt in source.take(3, 150)]

    assert {150} == {len(prompt) for prompt in prompts}
    assert len(prompts) == len({tuple(prompt[:16]) for prompt in prompts})


def test_a_text_too_short_is_refused() -> None:
    """Not cut in silence."""
    with pytest.raises(ValueError, match="only 10 tokens"):
        PromptSource(list(range(10))).take(1, 11)
