"""Computes rotary position embeddings: frequencies of every scaling type, a step's cosines and sines, the turn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config import ModelConfig, RopeConfig


class Rotary:
    """Gives cosines and sines of a step's positions.

    Made anew each step from a handful of frequencies: a table would take 134 MB for 131,072 positions of 128-wide
    heads. ``sin`` carries the sign of the half it multiplies, so a turn is ``x * cos + swap_halves(x) * sin``.

    A "dynamic" RoPE changes only beyond the model's context, where keys already cached could not follow; within it,
    which is all that is served, dynamic equals default, as in transformers.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        inv_freq, attention_factor = inverse_frequencies(config.rope, config.head_dim)
        num_turned, num_kept = config.num_heads + config.num_kv_heads, config.num_kv_heads
        # One row of a fused query-key-value: heads that turn, then values, which keep still at frequency 0.
        turning = torch.tensor([1.0] * num_turned + [0.0] * num_kept)[:, None]
        self._frequencies = (turning * torch.cat((inv_freq, inv_freq))).to(device)  # (heads, head_dim)
        self._attention_factor: Tensor | None = None
        if attention_factor != 1.0:
            self._attention_factor = torch.where(turning > 0, attention_factor, 1.0).to(device)
        half = config.head_dim // 2
        self._signs = torch.tensor([-1.0] * half + [1.0] * half, device=device)
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for all heads of a fused query-key-value row, (T, num_heads + 2 * num_kv_heads, head_dim).

        Values are "turned" by cos 1 and sin 0: one call per layer then serves the whole row, and keys and values stay
        side by side for the one write into the cache.
        """
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin_().mul_(self._signs)
        if self._attention_factor is not None:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads ``x`` (T, heads, head_dim) by the rows that :meth:`Rotary.at` gave (Su et al. 2021, eq. 34)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the radians per position of each pair, float32 (head_dim / 2,), and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type in ("default", "dynamic"):
        return plain, 1.0
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow long waves by ``factor``, keep short ones, blend linearly between (Llama 3.1 reference code)."""
    assert rope.original_max_positions is not None
    turns = rope.original_max_positions * plain / (2 * math.pi)  # turns of each pair over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Interpolate by NTK-by-parts (Peng et al. 2023, "YaRN", eq. 20-23)."""
    assert rope.original_max_positions is not None
    low = _pair_that_turns(rope.beta_fast, rope, head_dim)
    high = _pair_that_turns(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _pair_that_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the index of the pair that makes ``num_turns`` turns over the original context."""
    assert rope.original_max_positions is not None
    return head_dim * math.log(rope.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
