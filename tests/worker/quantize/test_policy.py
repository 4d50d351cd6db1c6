"""Which matrices are quantized, and what config.json says of it."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_name

from worker.quantize.errors import QuantizeError
from worker.quantize.policy import make_policy, quantization_config
from worker.quantize.rounding import Precision
from worker.quantize.shard_writer import TensorLayout

DENSE = {"model_type": "llama"}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8}
NESTED = {"model_type": "kimi_k25", "text_config": {"n_routed_experts": 384}}
MODULES = (
    "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.o_proj", "model.layers.0.mlp.gate_proj",
    "model.layers.3.mlp.gate", "model.layers.3.mlp.experts.0.gate_proj", "model.layers.3.mlp.experts.7.down_proj",
    "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.self_attn.kv_b_proj", "vision_tower.layers.0.q_proj",
)  # fmt: skip
NOTHING = {
    "model.embed_tokens",
    "lm_head",
    "model.layers.3.mlp.gate",
    "model.layers.3.self_attn.kv_b_proj",
    "vision_tower.layers.0.q_proj",
}


def _chosen(config: dict, name: str = "auto", overrides=(), columns: int = 256, group: int = 128) -> dict[str, str]:
    policy = make_policy(name, Precision(4, group), overrides, config)
    layout = TensorLayout(torch.bfloat16, (64, columns))
    found = {module: policy.precision(module, layout) for module in MODULES}
    return {module: str(precision) for module, precision in found.items() if precision}


def test_dense_models_have_int4_linear_layers() -> None:
    """And nothing else is touched."""
    assert dict.fromkeys([m for m in MODULES if m not in NOTHING], "INT4 g128") == _chosen(DENSE)


@pytest.mark.parametrize("config", [EXPERTS, NESTED], ids=["flat", "nested"])
def test_mixtures_have_int4_experts_and_8_bits_elsewhere(config: dict) -> None:
    """Shared experts are used for each token, so they are not experts in this."""
    found = _chosen(config)
    assert {m for m in MODULES if ".experts." in m} == {m for m, precision in found.items() if precision == "INT4 g128"}
    assert {m for m in MODULES if ".experts." not in m} - NOTHING == {
        m for m, precision in found.items() if precision == "INT8 g128"
    }
    assert {m for m in MODULES if ".experts." in m} == set(_chosen(config, "experts-only"))
    assert {} == _chosen(config, "none")


def test_ones_own_patterns_come_first() -> None:
    """In their order, and for what is otherwise left alone too."""
    found = _chosen(DENSE, overrides=(("*.q_proj", 8), ("*_proj", 16), ("lm_head", 8)))
    assert {
        "model.layers.0.self_attn.q_proj": "INT8 g128",
        "vision_tower.layers.0.q_proj": "INT8 g128",
        "lm_head": "INT8 g128",
    } == found
    with pytest.raises(QuantizeError, match="'x': bits must be"):
        _chosen(DENSE, overrides=(("x", 5),))


@pytest.mark.parametrize(
    ("columns", "group", "precision"),
    [(576, 128, "INT4 g64"), (576, 32, "INT4 g32"), (96, 128, "INT4 g32"), (100, 32, None)],
)
def test_groups_that_do_not_divide_a_row(columns: int, group: int, precision: str | None) -> None:
    """The next smaller size that does, or none."""
    assert precision == _chosen(DENSE, columns=columns, group=group).get(
        "lm_head" if precision is None else "model.layers.0.self_attn.q_proj"
    )


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "overrides",
    [(), (("model.layers.0.*", 8),), (("*.11.*", 16),)],
    ids=["plain", "one layer at 8", "one layer as it is"],
)
def test_targets_match_exactly(config: dict, overrides) -> None:
    """The library, given our config.json, finds the same precision for each module and none for the others."""
    policy = make_policy("auto", Precision(4, 64), overrides, config)
    layout = TensorLayout(torch.bfloat16, (64, 256))
    chosen = {m: p for m in MODULES if (p := policy.precision(m, layout))}
    others = [m for m in MODULES if m not in chosen]
    read = QuantizationConfig.model_validate(quantization_config(chosen, others))

    assert "pack-quantized" == read.format
    for module in MODULES:
        schemes = [
            scheme
            for scheme in read.config_groups.values()
            if any(match_name(module, target) for target in scheme.targets)
        ]
        ignored = any(match_name(module, target) for target in read.ignore)
        if module in chosen:
            assert [(chosen[module].bits, chosen[module].group_size)] == [
                (s.weights.num_bits, s.weights.group_size) for s in schemes
            ]
            assert not ignored
        else:
            assert ([], True) == (schemes, ignored)
