"""Whole models of each family on the GPU's backend, in Triton's interpreter: against the reference, and against themselves."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.comparison import logits_of
from kernels.backend import Backend, resolve
from worker.model import decoder
from worker.model.load import LoadedModel, load_model

# Small, and yet with a layer of each kind.
FAMILIES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "llama": (torch.bfloat16, {"num_hidden_layers": 2}),
    "qwen3_moe": (torch.float32, {"num_hidden_layers": 2, "mlp_only_layers": [0]}),
    "gemma3": (
        torch.float16,
        {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek_v3": (torch.float32, {"num_hidden_layers": 2}),
    "glm_moe_dsa": (torch.float32, {"num_hidden_layers": 2, "index_topk": 5, "indexer_types": ["full", "shared"]}),
}
PROMPT = [258, *((37 * i + i * i) % 256 for i in range(7))]
NUM_STEPS = 2
# Products round their operands to float16, attention queries and weights of keys: a few steps of 2^-11 each.
TOLERANCE = 2e-3


@pytest.fixture(autouse=True, scope="module")
def on_one_thread() -> Iterator[None]:
    """Small tensors only; and the reference packs natively."""
    threads = torch.get_num_threads()
    resolve("cpu")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, LoadedModel]:
    """One folder, loaded for the reference and for the GPU."""
    dtype, overrides = FAMILIES[request.param]
    folder: Path = tiny_models.save(
        tiny_models.make(request.param, **overrides), tmp_path_factory.mktemp(request.param), dtype
    )
    return load_model(folder, Backend.REF), load_model(folder, Backend.GPU)


def greedy(run: Any) -> tuple[torch.Tensor, list[int]]:
    """All logits of a prompt and of some steps after it, and the tokens chosen."""
    logits, tokens = [run.feed(("a", PROMPT))[0]], []
    for _ in range(NUM_STEPS):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(run.feed(("a", tokens[-1:]))[0])
    return torch.cat(logits), tokens


def test_a_model_is_the_references(
    pair: tuple[LoadedModel, LoadedModel], paged_run: Callable, relative_error: Callable
) -> None:
    """A prompt and decode steps give the reference's logits up to rounding, and its greedy tokens."""
    (expected, right), (logits, tokens) = (greedy(paged_run(loaded, "fp16")) for loaded in pair)
    assert relative_error(logits, expected) < TOLERANCE
    assert right == tokens


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_quantized_weights_and_pages(
    dtype: str, llama_in_transformers: Callable, gguf_of: Callable, paged_run: Callable, relative_error: Callable
) -> None:
    """Weights of five formats and pages of 16 and 8 bits.

    Where a stored key or value lies between two numbers that its type has, a rounding error decides: e4m3's are a sixteenth apart.
    """
    formats = {"attn_q": "Q4_0", "attn_output": "Q5_1", "ffn_down": "BF16", "token_embd": "Q8_0", "": "Q4_1"}
    path = gguf_of(llama_in_transformers(tie_word_embeddings=True), formats)
    loaded = [load_model(path, backend) for backend in (Backend.REF, Backend.GPU)]
    (expected, right), (logits, tokens) = (greedy(paged_run(one, dtype)) for one in loaded)
    assert relative_error(logits, expected) < (10 * TOLERANCE if dtype == "fp8" else 3 * TOLERANCE)
    assert right == tokens


def test_an_evaluation_runs_on_a_gpu(
    llama_in_transformers: Callable, folder_of: Callable, relative_error: Callable
) -> None:
    """What `sluicegate eval` makes logits with takes a pool where the model is."""
    folder = folder_of(llama_in_transformers(num_hidden_layers=1))
    expected, logits = (
        logits_of(load_model(folder, backend), PROMPT, "fp16", first_logit=3) for backend in (Backend.REF, Backend.GPU)
    )
    assert (len(PROMPT) - 3, 300) == tuple(logits.shape)
    assert relative_error(logits, expected) < TOLERANCE


@pytest.mark.usefixtures("ordered_products")
def test_same_bits_in_any_batch(pair: tuple[LoadedModel, LoadedModel], paged_run: Callable) -> None:
    """Whole; in chunks beside another prompt; and row by row beside two others, in decode steps padded to four rows."""
    _, loaded = pair
    whole = paged_run(loaded, "fp16").feed(("a", PROMPT))[0]
    run, parts = paged_run(loaded, "fp16"), []
    parts.append(run.feed(("b", [5, 6]), ("a", PROMPT[:4]))[1])
    for token in PROMPT[4:6]:
        parts.append(run.feed(("b", [7]), ("a", [token]), ("c", [9]))[1])
    parts.append(run.feed(("a", PROMPT[6:]))[0])
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, torch.cat(parts))


def test_another_pool_leaves_nothing_of_the_one_before(
    llama_in_transformers: Callable, folder_of: Callable, paged_run: Callable
) -> None:
    """Passes over another pool free the memory of the first one's at once, recorded ones included: nothing waits for the collector."""
    loaded = load_model(folder_of(llama_in_transformers(num_hidden_layers=1)), Backend.GPU)
    gc.disable()
    try:
        first = paged_run(loaded, "fp16")
        first.feed(("a", [5]))
        held = weakref.ref(first.pool.v)
        del first
        paged_run(loaded, "fp16").feed(("a", [5, 6]))
        assert held() is None
    finally:
        gc.enable()


def test_preparing_again_needs_no_room_for_two(
    llama_in_transformers: Callable, folder_of: Callable, paged_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was prepared for other sizes is gone before the new passes take their memory."""
    loaded = load_model(folder_of(llama_in_transformers(num_hidden_layers=1)), Backend.GPU)
    made: list[weakref.ref] = []

    class Steps:
        def __init__(self, *_: object) -> None:
            assert not [one for one in made if one() is not None]
            made.append(weakref.ref(self))

        def prepare(self, step_tokens: int, *, checks_reads: bool) -> None:
            pass

    monkeypatch.setattr(decoder, "DeviceSteps", Steps)
    pool = paged_run(loaded, "fp16").pool
    for max_sequences in (1, 2):
        loaded.model.prepare(pool, max_sequences, 2)
    assert 2 == len(made)
