"""Inverse rotary frequencies, with the scalings that this build knows."""

import math

import torch

from worker.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [head_dim / 2]. `factors` [head_dim / 2] divide the frequencies, as GGUF files store llama3 scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if factors is not None:
        return frequencies / factors.double()
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    return _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies with wavelengths over original/low are divided, those under original/high kept, others blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > scaling.original_context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < scaling.original_context / high, frequencies, scaled)
