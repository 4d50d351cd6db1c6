"""Rotary frequencies, with the scalings that this build knows, and the table of angles."""

import math
from dataclasses import replace

import torch

from kernels.rotary.ref import rotary_table
from worker.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [rotated dimensions / 2]. `factors` of this shape divide the frequencies, as GGUF files store llama3 scaling; a linear one comes on top."""
    dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if factors is not None:
        return frequencies / factors.double() / (1.0 if scaling is None else scaling.factor)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling) if scaling.kind == "llama3" else _yarn(frequencies, scaling, config.rope_theta)


def angle_table(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """What the `rotary` op reads, float32 [context_length, 2, rotated dimensions / 2]."""
    table = rotary_table(inverse_frequencies(config, factors), config.context_length)
    scaling = config.rope_scaling
    return table if scaling is None or scaling.attention_factor == 1.0 else table * scaling.attention_factor


def local_angle_table(config: ModelConfig) -> torch.Tensor | None:
    """The same for layers with a window, if their base is another: scaling doesn't concern them."""
    if config.local_rope_theta is None:
        return None
    return angle_table(replace(config, rope_theta=config.local_rope_theta, rope_scaling=None))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN sharpens attention for a context `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies with wavelengths over original/low are divided, those under original/high kept, others blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > scaling.original_context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < scaling.original_context / high, frequencies, scaled)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times in the original context are kept, those under beta_slow divided, others blended."""
    dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    places = torch.arange(dim // 2, dtype=torch.float64)
    divided = ((places - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
