"""The deepseek_v3 architecture (DeepSeek-V3 and R1, Kimi K2; DeepSeek-AI, 2024) and the text part of kimi_k25: latent attention, and after the
first layers mixtures of experts with a shared one, chosen by sigmoids with a correction. Layers past the last, which predict further
tokens, and Kimi's image tower are left out."""

from dataclasses import replace

from kernels.backend import Backend, device_of
from worker.model import glm4_moe
from worker.model.checkpoint import Checkpoint
from worker.model.config import MAX_LAYERS, ExpertsConfig, LatentConfig, ModelConfig
from worker.model.decoder import Decoder, Layer
from worker.model.errors import ModelError
from worker.model.hf_fields import Fields, decoder_config
from worker.model.latent_attention import LATENT_NAMES, LatentAttention
from worker.model.projection import load_norm
from worker.model.qwen3_moe import load_feed_forward
from worker.model.rope import angle_table, yarn_mscale

NAMES = glm4_moe.NAMES | LATENT_NAMES
_KIMI_PREFIX = "language_model."
KIMI_NAMES = {role: _KIMI_PREFIX + name for role, name in NAMES.items()}
# Where config.json leaves them out, as in transformers.
_USUAL = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}


def read_config(fields: Fields) -> ModelConfig:
    """The numbers of a deepseek_v3's or kimi_k2's config.json."""
    fields = fields.with_defaults(_USUAL)
    fields.require(
        hidden_act="silu", scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, qk_layernorm=False
    )
    fields.refuse_others("rope_interleave")
    q_rank = fields.get("q_lora_rank", int) if fields.has("q_lora_rank") else None
    config = latent_config(fields, q_rank, is_interleaved=fields.get("rope_interleave", bool, True))
    num_dense = max(0, min(fields.get("first_k_dense_replace", int), config.num_layers, MAX_LAYERS))
    return replace(config, experts=experts_config(fields, frozenset(range(num_dense))))


def read_kimi_config(fields: Fields) -> ModelConfig:
    """The numbers of the text part of a kimi_k25's config.json."""
    text = fields.inside("text_config").with_defaults({"model_type": "deepseek_v3"})
    if text.get("model_type", str) not in {"deepseek_v3", "kimi_k2"}:
        raise ModelError(f"{fields.label}: text_config.model_type must be deepseek_v3 or kimi_k2")
    return replace(read_config(text), architecture=fields.get("model_type", str))


def latent_config(fields: Fields, q_rank: int | None, *, is_interleaved: bool) -> ModelConfig:
    """The numbers of a model with latent attention. YaRN's sharpening goes into the softmax' scale, squared as queries and keys would have it."""
    config = decoder_config(fields)
    latent = LatentConfig(
        q_rank=q_rank,
        kv_rank=fields.get("kv_lora_rank", int),
        nope_dim=fields.get("qk_nope_head_dim", int),
        rope_dim=fields.get("qk_rope_head_dim", int),
        v_dim=fields.get("v_head_dim", int),
        is_interleaved=is_interleaved,
    )
    latent.check(fields.label)
    head_dim, scaling = latent.nope_dim + latent.rope_dim, config.rope_scaling
    sharpened = yarn_mscale(scaling.factor, scaling.mscale_all_dim) if scaling and scaling.mscale_all_dim else 1.0
    return replace(
        config,
        num_kv_heads=1,
        head_dim=head_dim,
        rotary_dim=latent.rope_dim,
        softmax_scale=head_dim**-0.5 * sharpened**2,
        qkv_bias=fields.get("attention_bias", bool, False),
        o_bias=fields.get("attention_bias", bool, False),
        latent=latent,
        num_predictors=glm4_moe.num_predictors(fields),
    )


def experts_config(fields: Fields, dense_layers: frozenset[int]) -> ExpertsConfig:
    """The mixtures of experts of this family."""
    size = fields.get("moe_intermediate_size", int)
    return ExpertsConfig(
        num_experts=fields.first_of(("n_routed_experts", "num_local_experts"), int),
        top_k=fields.get("num_experts_per_tok", int, 8),
        size=size,
        scoring="sigmoid",
        has_bias=True,
        num_groups=fields.get("n_group", int),
        top_groups=fields.get("topk_group", int),
        normalize=fields.get("norm_topk_prob", bool, True),
        scale=fields.get("routed_scaling_factor", float),
        shared_size=size * fields.get("n_shared_experts", int),
        dense_layers=dense_layers,
    )


def build(checkpoint: Checkpoint, backend: Backend) -> Decoder:
    """Load all weights."""
    config = checkpoint.config
    table = angle_table(config).to(device_of(backend))

    def load_layer(index: int) -> Layer:
        return Layer(
            attn_norm=load_norm(checkpoint, "attn_norm", index, config.hidden_size, backend),
            attention=LatentAttention.load(checkpoint, index, table, backend),
            ffn_norm=load_norm(checkpoint, "ffn_norm", index, config.hidden_size, backend),
            feed_forward=load_feed_forward(checkpoint, index, backend),
        )

    return Decoder(checkpoint, load_layer, backend)


ignored = glm4_moe.ignored


def kimi_ignored(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of tensors that predict further tokens, or that see images."""
    return (*(_KIMI_PREFIX + name for name in ignored(config)), "vision_tower.", "mm_projector.")
