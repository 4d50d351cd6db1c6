"""A sequence's logits have the same bits however its tokens are cut into steps and whoever shares the batch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.backend import Backend, resolve
from worker.model.load import LoadedModel, load_model

Make = Callable[..., Any]
# Several pages, and more keys than one range of the attention kernels.
TOKENS = [258, *((37 * i + i * i) % 256 for i in range(149))]
OTHERS = {"b": [(5 * i) % 256 for i in range(61)], "c": [7], "d": [(11 * i + 3) % 256 for i in range(133)]}
# A neighbour's format must not matter either: 4 bits, 8 bits with minima, unquantized.
FORMATS = {"attn_q": "Q4_0", "attn_output": "Q5_1", "ffn_down": "BF16", "token_embd": "Q8_0", "": "Q4_1"}


@pytest.fixture
def loaded(backend: Backend, llama_in_transformers: Callable[..., LlamaForCausalLM], gguf_of: Make) -> LoadedModel:
    """A model with weights of five formats."""
    model = llama_in_transformers(
        num_attention_heads=6, num_key_value_heads=2, hidden_size=96, tie_word_embeddings=True
    )
    return load_model(gguf_of(model, FORMATS), backend)


def _chunks(sizes: list[int]) -> Iterator[list[int]]:
    """Tokens in pieces of these sizes, the last of which is repeated."""
    start, turn = 0, 0
    while start < len(TOKENS):
        size = sizes[min(turn, len(sizes) - 1)]
        yield TOKENS[start : start + size]
        start, turn = start + size, turn + 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 118, 1], [2, 15, 100, 11, 3], [16], [17], [64], [149]], ids=str)
def test_chunked(sizes: list[int], dtype: str, loaded: LoadedModel, paged_run: Make) -> None:
    """Whole prefill, token by token at both ends, and chunks that do and don't end where pages do."""
    (whole,) = paged_run(loaded, dtype).feed(("a", TOKENS))
    run = paged_run(loaded, dtype)

    chunked = torch.cat([run.feed(("a", chunk))[0] for chunk in _chunks(sizes)])

    assert torch.isfinite(whole).all()
    assert torch.equal(whole, chunked)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_token_by_token(dtype: str, llama_in_transformers: Make, gguf_of: Make, paged_run: Make) -> None:
    """150 steps of one token, by the native kernels."""
    loaded = load_model(gguf_of(llama_in_transformers(), FORMATS), resolve("cpu"))
    (whole,) = paged_run(loaded, dtype).feed(("a", TOKENS))
    run = paged_run(loaded, dtype)

    assert torch.equal(whole, torch.cat([run.feed(("a", [token]))[0] for token in TOKENS]))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_batched_with_others(place: int, dtype: str, loaded: LoadedModel, paged_run: Make) -> None:
    """Beside prompts and single decode rows of others, at any place in the batch, in any pages."""
    (whole,) = paged_run(loaded, dtype).feed(("a", TOKENS))
    run = paged_run(loaded, dtype)
    parts = []
    for number, chunk in enumerate(_chunks([31, 1, 1, 19, 7, 1, 44])):
        batch = [(name, tokens[number : number + 1] if number else tokens) for name, tokens in OTHERS.items()]
        batch = [(name, tokens or [1]) for name, tokens in batch]
        batch.insert(place, ("a", chunk))
        parts.append(run.feed(*batch)[place])

    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_a_neighbours_nan_stays_its_own(dtype: str, loaded: LoadedModel, paged_run: Make) -> None:
    """NaN in the pages of one sequence spoils its rows, and no bit of another's."""
    expected = paged_run(loaded, dtype)
    expected.feed(("a", TOKENS[:40]))
    (alone,) = expected.feed(("a", TOKENS[40:50]))
    run = paged_run(loaded, dtype)
    run.feed(("a", TOKENS[:40]), ("b", OTHERS["b"]))
    page = run.pages["b"][0]
    run.pool.k.view(torch.uint8)[:, page] = 0x7F if dtype == "fp8" else 0xFF

    logits, spoilt = run.feed(("a", TOKENS[40:50]), ("b", [1, 2]))

    assert torch.isnan(spoilt).all()
    assert torch.equal(alone, logits)


def test_threads(llama_in_transformers: Make, gguf_of: Make, paged_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels give the same bits on one thread as on several."""
    path = gguf_of(llama_in_transformers(), FORMATS)
    logits = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("SLUICEGATE_THREADS", threads)
        loaded = load_model(path, resolve("cpu"))
        logits.append(paged_run(loaded).feed(("a", TOKENS))[0])
    monkeypatch.setenv("SLUICEGATE_THREADS", "2")
    resolve("cpu")

    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
