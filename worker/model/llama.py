"""The llama architecture: rotary grouped-query attention and SwiGLU between RMS norms (Touvron et al., 2023)."""

from kernels.backend import Backend
from kernels.rotary.ref import rotary_table
from worker.model.attention import GroupedQueryAttention
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.decoder import Decoder, Layer
from worker.model.feed_forward import GatedFeedForward
from worker.model.hf_fields import Fields, decoder_config
from worker.model.rope import inverse_frequencies

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
}


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a llama's config.json."""
    fields.require(attention_bias=False, mlp_bias=False, hidden_act="silu", partial_rotary_factor=1.0)
    fields.rope.require(partial_rotary_factor=1.0)
    return decoder_config(fields)


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load all weights."""
    config = checkpoint.config
    table = rotary_table(inverse_frequencies(config, checkpoint.rope_factors()), config.context_length)
    layers = [
        Layer(
            attn_norm=checkpoint.vector("attn_norm", index, config.hidden_size),
            attention=GroupedQueryAttention.load(checkpoint, index, table, backend),
            ffn_norm=checkpoint.vector("ffn_norm", index, config.hidden_size),
            feed_forward=GatedFeedForward.load(checkpoint, index, config.ffn_size, backend),
        )
        for index in range(config.num_layers)
    ]
    return Decoder(checkpoint, layers, backend)
