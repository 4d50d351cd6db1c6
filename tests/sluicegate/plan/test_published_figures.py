"""The arithmetic against figures that others published. Each names where the figure is from."""

import pytest

from sluicegate.plan.capacity import Plan
from sluicegate.plan.cards import find_card
from sluicegate.plan.flags import DEFAULT_MEMORY_FRACTION
from sluicegate.plan.known_models import KNOWN
from sluicegate.plan.parts import parts
from sluicegate.plan.precision import FORMATS, Policy, parse_policy
from sluicegate.plan.read_config import find_shape

GIB = 2**30


def _plan(model: str, weights: str | None = None, kv: str = "bf16", count: int = 8, tp: int = 8) -> Plan:
    shape = find_shape(model)
    return Plan(
        shape=shape, policy=parse_policy(weights or shape.as_shipped, shape), kv_format=kv, card=find_card("h200"), count=count, tp=tp,
        context=8192, concurrency=None, memory_fraction=DEFAULT_MEMORY_FRACTION, page_size=16, gpu_hour=None, holds_mtp=False,
    )  # fmt: skip


def test_glm_5_2_in_fp8() -> None:
    """703.7 GiB: Workers AI's "705" (post of 2026-08-03), and "755 GB" of zai-org/GLM-5.2-FP8 by phala.com/posts/glm-5-2-1m-context-8xh200."""
    size = _plan("glm-5.2").checkpoint_bytes(parse_policy("fp8", find_shape("glm-5.2")))
    assert 703.7 == pytest.approx(size / GIB, abs=0.05)
    assert 755 == pytest.approx(size / 1e9, abs=1)
    assert 705 == pytest.approx(size / GIB, rel=0.01)


def test_glm_5_2_in_int4() -> None:
    """421 GiB, and 52 for each of 8 GPUs without the prediction layer: Workers AI's post of 2026-08-03."""
    plan = _plan("glm-5.2", "int4-g32/bf16")
    assert 421 == pytest.approx(plan.checkpoint_bytes(plan.policy) / GIB, rel=0.01)
    without = sum(plan.policy.num_bytes(part) for part in plan.parts if not part.is_mtp)
    assert 52 == pytest.approx(without / 8 / GIB, abs=0.5)


def test_glm_5_2_in_bf16() -> None:
    """1507 GB: model card of Mapika/GLM-5.2-NVFP4, on the original."""
    plan = _plan("glm-5.2", "bf16")
    assert 1507 == round(plan.checkpoint_bytes(plan.policy) / 1e9)


def test_kimi_k2_6_kv_cache() -> None:
    """686 thousand tokens of BF16 and 1.37 million of FP8 KV on 8 H200: Workers AI's post of 2026-08-03."""
    wide, narrow = _plan("kimi-k2.6", kv="bf16"), _plan("kimi-k2.6", kv="fp8")
    assert (70_272, 35_136) == (wide.kv_bytes_per_token, narrow.kv_bytes_per_token)
    assert (70_272, 35_136) == (wide.kv_bytes_per_token_and_gpu, narrow.kv_bytes_per_token_and_gpu), (
        "a latent is on every GPU"
    )
    assert 1.37e6 == pytest.approx(narrow.tokens, rel=0.02)
    assert 686e3 == pytest.approx(wide.tokens, rel=0.02)
    assert 0 <= narrow.tokens - 2 * wide.tokens <= narrow.page_size, "twice, but for the last page"


def test_kimi_k2_6_elsewhere() -> None:
    """The same model on 4 H200 does not fit: model card of gratex/Kimi-K2.6-REAM-25 (about 555 GB, no meaningful KV on 4 x 141 GB)."""
    plan = _plan("kimi-k2.6", kv="fp8", count=4, tp=4)
    assert not plan.fits
    assert 555 == pytest.approx(plan.checkpoint_bytes(plan.policy) / GIB, rel=0.01)


def test_kimi_k2_6_checkpoint() -> None:
    """595 GB lossless (unsloth.ai/docs/models/tutorials/kimi-k2.6); 32 billion of 1 trillion parameters for each token (its model card)."""
    plan = _plan("kimi-k2.6")
    assert "int4-g32/bf16" == plan.policy.name
    assert 595 == pytest.approx(plan.checkpoint_bytes(plan.policy) / 1e9, rel=0.01)
    assert 32e9 == pytest.approx(plan.active_parameters, rel=0.02)


def test_deepseek_v3_tensor_by_tensor() -> None:
    """deepseek-ai/DeepSeek-V3's safetensors metadata: numbers in BF16, F8_E4M3 and F32, to the last one (scales are F32)."""
    found = parts(find_shape("deepseek-v3"))
    matrices = [part for part in found if part.kind in ("matrix", "expert")]
    policy = Policy("fp8", FORMATS["fp8"], FORMATS["fp8"])
    num_scales, rest = divmod(sum(policy.num_bytes(part) - part.num_parameters for part in matrices), 4)
    assert 680_571_043_840 == sum(part.num_parameters for part in matrices)
    assert 3_918_786_560 == sum(part.num_parameters for part in found if part.kind == "plain")
    assert (41_555_600, 0) == (num_scales + sum(part.num_parameters for part in found if part.kind == "float32"), rest)


# Totals in the safetensors metadata of the repositories that known_models.py names (deepseek-v3: less the scales), of gemma-3-4b and 27b the text part.
TOTALS = {
    "deepseek-v3": 684_489_845_504,
    "glm-4.6": 358_337_791_296,
    "glm-4.5-air": 110_468_824_832,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "smollm2-135m-instruct": 134_515_008,
}


@pytest.mark.parametrize("model", TOTALS)
def test_parameters(model: str) -> None:
    """Parameters of a built-in model are those that its publisher's files hold."""
    assert TOTALS[model] == sum(_plan(model, "bf16", tp=1).parameters.values())


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    # Published names and cards: GLM-5 744B with 40B active (754B in the repository, with the prediction layer), GLM-4.6 355B-A32B, GLM-4.5-Air 106B-A12B, DeepSeek-V3 671B-A37B.
    [("glm-5", 744, 40), ("glm-5.2", 744, 40), ("glm-4.6", 355, 32), ("glm-4.5-air", 106, 12), ("deepseek-v3", 671, 37), ("qwen3-235b-a22b", 235, 22), ("qwen3-30b-a3b", 30, 3)],
)  # fmt: skip
def test_labels(model: str, billions: float, active: float) -> None:
    """Names round, so a few percent are theirs; embeddings count as active for some publishers."""
    plan = _plan(model, "bf16", tp=1)
    assert billions == pytest.approx(sum(part.num_parameters for part in plan.parts if not part.is_mtp) / 1e9, rel=0.02)
    assert active == pytest.approx(plan.active_parameters / 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [("qwen3-0.6b", 114_688), ("qwen3-8b", 147_456), ("llama-3.1-8b", 131_072), ("llama-3.2-1b", 32_768)],
)
def test_kv_bytes(model: str, num_bytes: int) -> None:
    """2 x layers x kv heads x head size x 2 bytes, of sizes in the models' papers and cards."""
    assert num_bytes == _plan(model, tp=1).kv_bytes_per_token
    assert num_bytes == 2 * _plan(model, tp=1, kv="fp8").kv_bytes_per_token


def test_index_share() -> None:
    """GLM-5.2's layers 0 to 2 and every fourth from 6 own an indexer: 21 of 78 (GLM_5_2_DEFAULT_INDEXER_TYPES in llama.cpp's glm-dsa.cpp)."""
    indexer = find_shape("glm-5.2").indexer
    assert indexer is not None
    assert 21 == indexer.num_owners


def test_every_built_in_model_is_read() -> None:
    """No name is listed that cannot be planned."""
    for name in KNOWN:
        assert sum(_plan(name, tp=1).parameters.values()) > 1e8
