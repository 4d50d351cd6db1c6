"""The gemma3 architecture, its text part: norms before and after each part, GeGLU, normalized heads, scaled embeddings, and five layers
with a window to each one without (Gemma Team, 2025)."""

from dataclasses import replace

from kernels.backend import Backend, device_of
from worker.model import qwen3
from worker.model.attention import GroupedQueryAttention
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.decoder import Decoder, Layer
from worker.model.feed_forward import GatedFeedForward
from worker.model.hf_fields import Fields, decoder_config, layer_windows, rope_scaling
from worker.model.projection import load_norm
from worker.model.rope import angle_table, local_angle_table

_LOCAL_THETA, _GLOBAL_THETA = 10000.0, 1000000.0
NAMES = qwen3.NAMES | {
    "post_attn_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "post_ffn_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
WHOLE_NAMES = {role: f"language_model.{name}" for role, name in NAMES.items()}
# What config.json of a model that sees pictures leaves out.
_USUAL = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
}  # fmt: skip


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a gemma3_text's config.json, with the bases of rotation under their older or their newer names."""
    fields.require(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    fields.refuse_others("layer_types", "sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar")
    config = decoder_config(fields, head_dim=256, tie_embeddings=True, rope_theta=_GLOBAL_THETA)
    local_theta = fields.get("rope_local_base_freq", float, _LOCAL_THETA)
    rope = fields.rope
    if rope.has("full_attention") or rope.has("sliding_attention"):
        wide, near = rope.inside("full_attention"), rope.inside("sliding_attention")
        near.require(rope_type="default")
        config = replace(
            config,
            rope_theta=wide.get("rope_theta", float, config.rope_theta),
            rope_scaling=rope_scaling(wide, config.context_length),
        )
        local_theta = near.get("rope_theta", float, local_theta)  # fmt: skip
    pattern = fields.get("sliding_window_pattern", int, 6)
    has_bias = fields.get("attention_bias", bool, False)
    return replace(
        config,
        windows=layer_windows(fields, config.num_layers, lambda layer: pattern < 1 or bool((layer + 1) % pattern)),
        local_rope_theta=local_theta,
        softmax_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        qk_norm=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
        embedding_factor=float(config.hidden_size) ** 0.5 if config.hidden_size > 0 else 1.0,
        norm_offset=1.0,
    )


def read_whole_config(fields: Fields) -> ModelConfig:
    """The numbers of the text part of a model that sees pictures too."""
    text = fields.inside("text_config").with_defaults(_USUAL)
    text.require(model_type="gemma3_text")
    return replace(read_config(text), architecture=fields.get("model_type", str))


def whole_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that see pictures."""
    return ("vision_tower.", "multi_modal_projector.")


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load all weights."""
    config = checkpoint.config
    device, near = device_of(backend), local_angle_table(config)
    table = angle_table(config, checkpoint.rope_factors()).to(device)
    near = None if near is None else near.to(device)

    def load_layer(index: int) -> Layer:
        norms = {
            role: load_norm(checkpoint, role, index, config.hidden_size, backend)
            for role in ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")
        }
        attention = GroupedQueryAttention.load(checkpoint, index, table, backend, near)
        feed_forward = GatedFeedForward.load(checkpoint, index, config.ffn_size, backend, is_gelu=True)
        return Layer(attention=attention, feed_forward=feed_forward, **norms)

    return Decoder(checkpoint, load_layer, backend)
