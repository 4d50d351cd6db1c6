"""Division among GPUs, whole pages, the floor of a step, and advice that holds."""

import json
from fractions import Fraction
from itertools import combinations, product

import pytest

from sluicegate.command import main
from sluicegate.plan.capacity import Plan
from sluicegate.plan.cards import CARDS, find_card
from sluicegate.plan.precision import parse_policy
from sluicegate.plan.read_config import find_shape
from sluicegate.plan.shape import Experts


def _plan(model: str, **changes: object) -> Plan:
    shape = find_shape(model)
    plan = Plan(
        shape=shape, policy=parse_policy("bf16", shape), kv_format="bf16", card=find_card("h100"), count=1, tp=1, context=4096,
        concurrency=None, memory_fraction=0.9, page_size=16, gpu_hour=None, holds_mtp=False,
    )  # fmt: skip
    return plan.but(**changes)


def test_kv_heads_are_divided_until_there_is_one_for_each_gpu() -> None:
    """8 kv heads: an eighth on each of 8 GPUs, still one whole head on each of 16 and 32."""
    whole = _plan("llama-3.1-8b").kv_bytes_per_token
    for tp, share in ((1, 1), (2, 0.5), (8, 0.125), (16, 0.125), (32, 0.125)):
        assert whole * share == _plan("llama-3.1-8b", count=tp, tp=tp).kv_bytes_per_token_and_gpu


def test_uneven_kv_heads_follow_the_fullest_gpu() -> None:
    """3 kv heads on 9 heads' worth of GPUs: with 9 GPUs each has one, with 3 too."""
    whole = _plan("smollm2-135m-instruct").kv_bytes_per_token
    assert whole / 3 == _plan("smollm2-135m-instruct", count=3, tp=3).kv_bytes_per_token_and_gpu
    assert whole / 3 == _plan("smollm2-135m-instruct", count=9, tp=9).kv_bytes_per_token_and_gpu


def test_all_gpus_of_a_group_hold_the_weights_once_and_copies_of_the_rest() -> None:
    """Eight GPUs' parts sum up to the model and seven more copies of what cannot be divided."""
    one, eight = _plan("deepseek-v3"), _plan("deepseek-v3", count=8, tp=8)
    copied = sum(one.policy.num_bytes(part) for part in one.parts if part.share == "copy" and not part.is_mtp)
    assert copied > 0
    assert sum(one.weights_per_gpu.values()) + 7 * copied == pytest.approx(8 * sum(eight.weights_per_gpu.values()))


def test_groups_multiply_what_fits() -> None:
    """Four groups of two GPUs hold four times what one group does."""
    one, four = _plan("llama-3.1-8b", count=2, tp=2), _plan("llama-3.1-8b", count=8, tp=2)
    assert (4 * one.tokens, 4 * one.requests_that_fit) == (four.tokens, four.requests_that_fit)
    assert 4 * one.decode(5).tokens_per_second == pytest.approx(four.decode(5).tokens_per_second)


def test_only_whole_pages_hold_tokens() -> None:
    """A request occupies whole pages, a pool has whole pages."""
    plan = _plan("llama-3.1-8b", page_size=256, context=257)
    assert 0 == plan.tokens % 256
    assert plan.tokens // 512 == plan.requests_that_fit
    exact = plan.pool_bytes / plan.kv_bytes_per_token
    assert exact - 256 < plan.tokens <= exact


def test_the_last_request_that_fits() -> None:
    """As many as fit do fit, one more does not, and what it lacks is less than a request."""
    plan = _plan("llama-3.1-8b", context=5000)
    most = plan.requests_that_fit
    assert plan.but(concurrency=most).fits
    more = plan.but(concurrency=most + 1)
    assert not more.fits
    assert 0 < more.missing_bytes_per_gpu <= 5008 * plan.kv_bytes_per_token
    assert 0 == plan.but(concurrency=most).missing_bytes_per_gpu


@pytest.mark.parametrize(("num_experts", "num_chosen", "batch"), [(4, 2, 3), (5, 1, 4), (6, 3, 2)])
def test_experts_read_is_the_mean_over_all_choices(num_experts: int, num_chosen: int, batch: int) -> None:
    """Counted over every choice that `batch` tokens can make."""
    choices = list(combinations(range(num_experts), num_chosen))
    seen = [len(set().union(*chosen)) for chosen in product(choices, repeat=batch)]
    plan = _plan("qwen3-30b-a3b")
    shape = plan.but(shape=_with_experts(plan, num_experts, num_chosen))
    assert float(Fraction(sum(seen), len(seen))) == pytest.approx(shape.experts_read(batch))


def _with_experts(plan: Plan, num_experts: int, num_chosen: int) -> object:
    from dataclasses import replace

    return replace(plan.shape, experts=Experts(48, num_experts, num_chosen, 768, 0, has_correction_bias=False))


def test_the_floor_of_a_dense_model() -> None:
    """All weights but the embedding's unused rows, once, and the KV of each sequence; by hand."""
    plan = _plan("llama-3.1-8b", context=1000, gpu_hour=3.6)
    embedding = 128_256 * 4096
    for batch in (1, 7):
        moved = 2 * (8_030_261_248 - embedding) + batch * (2 * 4096 + 1000 * 131_072)
        found = plan.decode(batch)
        assert moved == pytest.approx(found.bytes_per_gpu)
        assert moved / 3.35e12 == pytest.approx(found.seconds)
        assert 0.001 / (batch / found.seconds) * 1e6 == pytest.approx(found.cost_per_million)


def test_a_tied_embedding_is_read_whole() -> None:
    """It is the head too."""
    assert 2 * 134_515_008 == pytest.approx(_plan("smollm2-135m-instruct", context=1).decode(1).bytes_per_gpu, rel=1e-3)


def test_windows_and_indexers_limit_what_is_read() -> None:
    """Gemma's local layers read a window, GLM-5's layers the chosen tokens; what they keep is all."""
    near, far = _plan("gemma-3-1b", context=512), _plan("gemma-3-1b", context=32_768)
    assert near.kv_bytes_per_token == far.kv_bytes_per_token == 26 * 2 * 256 * 2
    assert 22 * 512 * 1024 + 4 * 32_768 * 1024 == far.kv_bytes_read()
    plan = _plan("glm-5.2", context=100_000)
    assert 2 * (78 * 2048 * 576 + 100_000 * 21 * 128) == plan.kv_bytes_read()


def test_seals_are_what_the_integrity_page_says() -> None:
    """8 bytes for each layer, kv head and page: 0.20% of 16-bit pages of 16 tokens and head size 64 (docs/integrity.md)."""
    plan = _plan("llama-3.2-1b")
    assert 0.0020 == pytest.approx(plan.seal_bytes_per_token / plan.kv_bytes_per_token, abs=5e-5)


def test_a_prediction_layer_is_held_only_if_asked_for() -> None:
    """Its bytes are in the checkpoint either way."""
    without, held = _plan("glm-5.2"), _plan("glm-5.2", holds_mtp=True)
    more = sum(held.weights_per_gpu.values()) - sum(without.weights_per_gpu.values())
    assert held.policy.num_bytes(next(p for p in held.parts if p.is_mtp and p.kind == "expert")) < more
    assert without.checkpoint_bytes(without.policy) == held.checkpoint_bytes(held.policy)


TOO_MUCH = [
    ["kimi-k2.6", "--count", "4", "--kv", "fp8"],
    ["glm-5.2", "--count", "8"],
    ["llama-3.1-70b", "--gpu", "h100", "--count", "2"],
    ["llama-3.1-8b", "--gpu", "rtx-4090", "--context", "60000"],
    ["qwen3-8b", "--gpu", "l4", "--concurrency", "400", "--context", "4000"],
    ["qwen3-30b-a3b", "--gpu", "rtx-4090", "--count", "2", "--tp", "1", "--concurrency", "3"],
    ["gemma-3-27b", "--gpu", "a10g", "--kv", "fp8", "--concurrency", "9"],
    ["deepseek-v3", "--gpu", "l40s", "--count", "3", "--tp", "1", "--memory-fraction", "0.5"],
]


@pytest.mark.parametrize("question", TOO_MUCH, ids=" ".join)
def test_advice_holds(question: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is advised, asked in place of what did not fit, fits."""
    assert 1 == main(["plan", *question, "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not found["fits"]
    assert found["missing_bytes_per_gpu"] > 0
    assert f"sluicegate: {question[0]} does not fit\n" == err
    assert found["remedies"]
    for remedy in found["remedies"]:
        changed = remedy.partition(" (")[0].split()
        assert 0 == main(["plan", *question, *changed, "--json"]), remedy
        assert json.loads(capsys.readouterr().out)["fits"]


def test_cards_are_plausible() -> None:
    """Units: memory between 16 GiB and 256 GiB, bandwidth between 0.2 and 10 TB/s, and no name twice."""
    for name, card in CARDS.items():
        assert name == card.name
        assert 16 * 2**30 < card.memory_bytes < 256 * 2**30
        assert 2e11 < card.bandwidth < 1e13
    other = find_card("96:1800")
    assert (96 * 2**30, 1.8e12) == (other.memory_bytes, other.bandwidth)
