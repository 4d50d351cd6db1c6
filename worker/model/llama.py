"""The llama architecture: rotary grouped-query attention and SwiGLU between RMS norms (Touvron et al., 2023).

Others that differ from it by biases or norms of heads alone are built here too: their configurations say so.
"""

from dataclasses import replace

from kernels.backend import Backend, device_of
from worker.model.attention import GroupedQueryAttention
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.decoder import Decoder, Layer
from worker.model.feed_forward import GatedFeedForward
from worker.model.hf_fields import Fields, decoder_config
from worker.model.projection import load_norm
from worker.model.rope import angle_table

_ATTENTION = "model.layers.{layer}.self_attn."
_FFN = "model.layers.{layer}.mlp."
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    **{role: f"{_ATTENTION}{role}_proj.weight" for role in ("q", "k", "v", "o")},
    **{f"{role}_bias": f"{_ATTENTION}{role}_proj.bias" for role in ("q", "k", "v", "o")},
    **{role: f"{_FFN}{role}_proj.weight" for role in ("gate", "up", "down")},
    **{f"{role}_bias": f"{_FFN}{role}_proj.bias" for role in ("gate", "up", "down")},
}


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a llama's config.json."""
    fields.require(hidden_act="silu")
    fields.refuse_others()
    has_bias = fields.get("attention_bias", bool, False)
    config = decoder_config(fields)
    return replace(config, qkv_bias=has_bias, o_bias=has_bias, ffn_bias=fields.get("mlp_bias", bool, False))


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load all weights."""
    config = checkpoint.config
    table = angle_table(config, checkpoint.rope_factors()).to(device_of(backend))

    def load_layer(index: int) -> Layer:
        return Layer(
            attn_norm=load_norm(checkpoint, "attn_norm", index, config.hidden_size, backend),
            attention=GroupedQueryAttention.load(checkpoint, index, table, backend),
            ffn_norm=load_norm(checkpoint, "ffn_norm", index, config.hidden_size, backend),
            feed_forward=GatedFeedForward.load(checkpoint, index, config.ffn_size, backend),
        )

    return Decoder(checkpoint, load_layer, backend)
