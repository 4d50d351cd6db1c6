"""The glm4_moe architecture (GLM-4.5 to 4.7): partly rotated heads, and after the first layers mixtures of experts with a shared one,
chosen by sigmoids with a correction (GLM-4.5 Team, 2025). Layers past the last, which predict further tokens, are left out."""

from dataclasses import replace

from worker.model import qwen3_moe
from worker.model.config import MAX_LAYERS, ExpertsConfig, ModelConfig
from worker.model.hf_fields import Fields, decoder_config

NAMES = qwen3_moe.NAMES | {
    "router_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    **{f"shared_{role}": f"model.layers.{{layer}}.mlp.shared_experts.{role}_proj.weight" for role in ("gate", "up", "down")},
}  # fmt: skip

build = qwen3_moe.build
_USUAL = {"rms_norm_eps": 1e-5}  # where config.json leaves it out, as in transformers


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a glm4_moe's config.json."""
    fields = fields.with_defaults(_USUAL)
    fields.require(hidden_act="silu")
    fields.refuse_others("partial_rotary_factor")
    config = decoder_config(fields)
    part = fields.rope.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 0.5))
    size = fields.get("moe_intermediate_size", int)
    num_dense = max(0, min(fields.get("first_k_dense_replace", int, 1), config.num_layers, MAX_LAYERS))
    experts = ExpertsConfig(
        num_experts=fields.first_of(("n_routed_experts", "num_local_experts"), int),
        top_k=fields.get("num_experts_per_tok", int, 8),
        size=size,
        scoring="sigmoid",
        has_bias=True,
        num_groups=fields.get("n_group", int, 1),
        top_groups=fields.get("topk_group", int, 1),
        normalize=fields.get("norm_topk_prob", bool, True),
        scale=fields.get("routed_scaling_factor", float, 1.0),
        shared_size=size * fields.get("n_shared_experts", int, 1),
        dense_layers=frozenset(range(num_dense)),
    )
    return replace(
        config,
        rotary_dim=int(config.head_dim * max(0.0, min(part, 1.0))),
        qk_norm=fields.get("use_qk_norm", bool, False),
        qkv_bias=fields.get("attention_bias", bool, False),
        experts=experts,
        num_predictors=num_predictors(fields),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that predict further tokens: they follow the last layer."""
    past = range(config.num_layers, config.num_layers + config.num_predictors)
    return tuple(f"model.layers.{layer}." for layer in past)


def num_predictors(fields: Fields) -> int:
    """How many layers past the last one may follow. One even where config.json names none: some checkpoints keep it and don't say so."""
    count: int = fields.get("num_nextn_predict_layers", int, 1)
    return count or 1
