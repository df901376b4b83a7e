"""Rotary position embeddings (Su et al., RoFormer), in the half-split form of Llama."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from fsdpctl.config.model import ModelConfig

_FAST, _SLOW = 32, 1  # turns per original length, between which YaRN interpolates


def inverse_frequencies(config: ModelConfig, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of dimensions; float32, (head_dim / 2,).

    With `rope_scaling=linear`, all wavelengths are stretched by `rope_factor`. With `llama3`,
    wavelengths far above the original training length are stretched, those far below are kept, and
    those between are interpolated (Llama 3.1). With `yarn`, dimensions are interpolated between
    both, in a range that follows from turns per original length (Peng et al., YaRN, 2023).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling == "none":
        return frequencies
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "yarn":
        return _yarn(config, head_dim, frequencies)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_len * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.rope_factor + blend * frequencies


def _yarn(config: ModelConfig, head_dim: int, frequencies: Tensor) -> Tensor:
    def dimension(turns: int) -> float:
        ratio = math.log(config.rope_original_len / (turns * 2 * math.pi))
        return head_dim * ratio / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(_FAST)), 0)
    high = min(math.ceil(dimension(_SLOW)), head_dim - 1)
    places = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((places - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return stretched * frequencies / config.rope_factor + (1 - stretched) * frequencies


def _magnitude(config: ModelConfig) -> float:
    """Return YaRN's factor of queries and keys, else 1."""
    if config.rope_scaling != "yarn" or config.rope_factor <= 1:
        return 1.0
    return 0.1 * math.log(config.rope_factor) + 1.0


@lru_cache(maxsize=8)
def rotation(
    config: ModelConfig, head_dim: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, each of shape (length, head_dim)."""
    frequencies = inverse_frequencies(config, head_dim).to(device)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    magnitude = _magnitude(config)
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of dimensions of `x`, (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
