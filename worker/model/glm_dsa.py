"""The glm_moe_dsa architecture (GLM-5): deepseek_v3 whose attention looks at positions that an indexer chooses, in some layers at those of the
layer before (IndexShare)."""

from dataclasses import replace

from worker.model import deepseek
from worker.model.config import IndexerConfig, ModelConfig
from worker.model.errors import ModelError
from worker.model.hf_fields import Fields

NAMES = deepseek.NAMES
build = deepseek.build
ignored = deepseek.ignored
# Where config.json leaves them out, as in transformers.
_USUAL = {
    "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "first_k_dense_replace": 3,
}  # fmt: skip
_KINDS = {"full": True, "F": True, "shared": False, "S": False}


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a glm_moe_dsa's config.json."""
    fields = fields.with_defaults(_USUAL)
    fields.require(
        hidden_act="silu", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, qk_layernorm=False, mlp_bias=False,
        rope_interleave=True, indexer_rope_interleave=True,
    )  # fmt: skip
    fields.refuse_others("rope_interleave", "layer_types")
    if any(kind != "indexed_attention" for kind in fields.get("layer_types", list, [])):
        raise ModelError(f"{fields.label}: layer_types must be indexed_attention everywhere")
    config = deepseek.latent_config(fields, fields.get("q_lora_rank", int), is_interleaved=True)
    assert config.latent is not None
    indexer = IndexerConfig(
        num_heads=fields.get("index_n_heads", int),
        head_dim=fields.get("index_head_dim", int),
        top_k=fields.get("index_topk", int),
        layers=_own_indexers(fields, config.num_layers),
    )
    indexer.check(fields.label, config.latent.rope_dim)
    experts = deepseek.experts_config(fields, _dense_layers(fields, config.num_layers))
    return replace(config, experts=experts, latent=replace(config.latent, indexer=indexer))


def _own_indexers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers with an indexer of their own: by a list, by a pattern of letters, or every so many from an offset on."""
    if fields.has("indexer_types"):
        kinds = fields.get("indexer_types", list)
    elif fields.has("index_topk_pattern"):
        kinds = list(fields.get("index_topk_pattern", str))
    else:
        step = max(fields.get("index_topk_freq", int, 1), 1)
        offset = fields.get("index_skip_topk_offset", int, 2)
        kinds = ["S" if max(layer - offset + 1, 0) % step else "F" for layer in range(min(num_layers, 1024))]
    if len(kinds) != num_layers or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds):
        raise ModelError(f"{fields.label}: indexer_types must name full or shared for each of {num_layers} layers")
    if not kinds or not _KINDS[kinds[0]]:
        raise ModelError(
            f"{fields.label}: indexer_types must begin with full: the first layer has nobody to share with"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if _KINDS[kind])


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    num_dense = fields.get("first_k_dense_replace", int)
    usual = ["dense" if layer < num_dense else "sparse" for layer in range(min(num_layers, 1024))]
    kinds = fields.get("mlp_layer_types", list, usual)
    if len(kinds) != num_layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise ModelError(f"{fields.label}: mlp_layer_types must name dense or sparse for each of {num_layers} layers")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")
