"""Frequencies and tables of rotary embeddings, in float32 as transformers computes them."""

import functools
import math
from dataclasses import dataclass

import torch

from common.model.rope import Linear, Llama3, LongRope, Rope, Yarn


@functools.cache
def frequencies(rope: Rope) -> torch.Tensor:
    """[rope.dim / 2], radians a position."""
    periods: torch.Tensor = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    match rope.scaling:
        case None:
            return 1.0 / periods
        case Linear(factor):
            return 1.0 / periods / factor
        case LongRope(factors):
            return 1.0 / (torch.tensor(factors) * periods)
        case Yarn(factor, low, high):
            kept = 1 - ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp(0, 1)
            return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
        case Llama3():
            return _llama3(1.0 / periods, rope.scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    original, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(wavelengths > original / low, plain / scaling.factor, between)
    return torch.where(wavelengths < original / high, plain, scaled)


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a step multiplies queries and keys by. Dimensions that are not rotated have 1 and 0."""

    half: int  # half of the dimensions that are rotated
    cos: torch.Tensor  # [T, 1, head dim]
    sin: torch.Tensor  # [T, 1, head dim], its first half negated


def rotary(positions: torch.Tensor, rope: Rope, head_dim: int, dtype: torch.dtype) -> Rotary:
    angles = positions[:, None, None].float() * frequencies(rope)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    rest = cos.new_ones(len(positions), 1, head_dim - rope.dim)
    cos, sin = torch.cat([cos, cos, rest], -1), torch.cat([-sin, sin, rest * 0], -1)
    return Rotary(rope.dim // 2, cos.to(dtype), sin.to(dtype))
