"""The qwen3_moe architecture: qwen3 whose feed-forwards are mixtures of experts, chosen by a softmax (Yang et al., 2025)."""

from dataclasses import replace

from kernels.backend import Backend, device_of
from worker.model import qwen3
from worker.model.attention import GroupedQueryAttention
from worker.model.checkpoint import Checkpoint
from worker.model.config import ExpertsConfig, ModelConfig
from worker.model.decoder import Decoder, FeedForward, Layer
from worker.model.errors import ModelError
from worker.model.feed_forward import GatedFeedForward
from worker.model.hf_fields import Fields, decoder_config
from worker.model.mixture import MixtureFeedForward
from worker.model.projection import load_norm
from worker.model.rope import angle_table

NAMES = qwen3.NAMES | {
    "router": "model.layers.{layer}.mlp.gate.weight",
    **{f"expert_{role}": f"model.layers.{{layer}}.mlp.experts.{{expert}}.{role}_proj.weight" for role in ("gate", "up", "down")},
}  # fmt: skip


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a qwen3_moe's config.json. Every `decoder_sparse_step`-th layer is a mixture, unless `mlp_only_layers` names it."""
    fields.require(hidden_act="silu")
    fields.refuse_others()
    has_bias = fields.get("attention_bias", bool, False)
    config = decoder_config(fields)
    step, named = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1 or not all(type(layer) is int for layer in named):
        raise ModelError(f"{fields.label}: decoder_sparse_step or mlp_only_layers is out of range")
    layers = range(min(config.num_layers, 1024))
    experts = ExpertsConfig(
        num_experts=fields.first_of(("num_experts", "num_local_experts"), int),
        top_k=fields.get("num_experts_per_tok", int, 8),
        size=fields.get("moe_intermediate_size", int),
        normalize=fields.get("norm_topk_prob", bool, False),
        dense_layers=frozenset(layer for layer in layers if layer in named or (layer + 1) % step),
    )
    return replace(config, qk_norm=True, qkv_bias=has_bias, o_bias=has_bias, experts=experts)


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load all weights."""
    config = checkpoint.config
    table = angle_table(config, checkpoint.rope_factors()).to(device_of(backend))

    def load_layer(index: int) -> Layer:
        return Layer(
            attn_norm=load_norm(checkpoint, "attn_norm", index, config.hidden_size, backend),
            attention=GroupedQueryAttention.load(checkpoint, index, table, backend),
            ffn_norm=load_norm(checkpoint, "ffn_norm", index, config.hidden_size, backend),
            feed_forward=load_feed_forward(checkpoint, index, backend),
        )

    return Decoder(checkpoint, load_layer, backend)


def load_feed_forward(checkpoint: Checkpoint, layer: int, backend: Backend) -> FeedForward:
    """A layer's mixture, or its ordinary feed-forward."""
    config = checkpoint.config
    if config.experts is None or layer in config.experts.dense_layers:
        return GatedFeedForward.load(checkpoint, layer, config.ffn_size, backend)
    return MixtureFeedForward.load(checkpoint, layer, config.experts, backend)
