"""Rounds weights to four-bit groups: the rounding trained through, and the two layouts of the ecosystem that store it.

::

    layout  levels            qweight                    qzeros                     scales
    GPTQ    q in 0..15, z=8   int32 (in/8, out)          int32 (in/g, out/8), z-1   float16 (in/g, out)
    AWQ     q in 0..15, z     int32 (in, out/8)          int32 (in/g, out/8)        float16 (in/g, out)

GPTQ packs eight consecutive inputs into a word, lowest bits first, and stores zero points less one (format "v1"). AWQ
packs eight consecutive outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. In both, weight = (q - z) * scale.

References
----------
Frantar et al. 2023, "GPTQ"; Lin et al. 2024, "AWQ: Activation-aware Weight Quantization" (layout "GEMM");
Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons" (straight-through estimator).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["gptq", "awq"]

_HIGHEST = 15
_GPTQ_ZERO = 8
_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# A group of zeros has no range; weights are divided by the scale all the same.
_LEAST_SCALE = 1e-5


def to_levels(weight: Tensor, group_size: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to sixteen levels a group.

    Parameters
    ----------
    weight : float32 (out, in); ``in`` is a multiple of ``group_size``

    Returns
    -------
    levels : float32 (out, in/g, g), whole numbers 0 to 15
    zeros : float32 (out, in/g, 1), whole numbers 0 to 15
    scales : float32 (out, in/g, 1), representable in float16
    """
    groups = weight.float().view(weight.shape[0], -1, group_size)
    if layout == "gptq":
        scales = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(_LEAST_SCALE).half().float()
        zeros = torch.full_like(scales, _GPTQ_ZERO)
    else:
        # Zero is always within the range, so that a zero weight stays zero.
        low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True).clamp_min(0)
        scales = ((high - low) / _HIGHEST).clamp_min(_LEAST_SCALE).half().float()
        zeros = (-low / scales).round().clamp(0, _HIGHEST)
    levels = ((groups / scales).round() + zeros).clamp(0, _HIGHEST)
    return levels, zeros, scales


def fake_quantize(weight: Tensor, group_size: int, layout: Layout, share: Tensor | float = 1.0) -> Tensor:
    """Return the weight as it will be stored, its gradient passed straight through.

    ``share`` blends from the raw weight (0) to the rounded one (1), so that rounding can be phased in.
    """
    with torch.no_grad():
        levels, zeros, scales = to_levels(weight, group_size, layout)
        error = ((levels - zeros) * scales).flatten(1) - weight
    return weight + share * error


def _pack(levels: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack the last axis, eight to a word: word bit field ``i`` holds entry ``order[i]``."""
    fields = levels.to(torch.int64).reshape(*levels.shape[:-1], -1, _PER_WORD)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int64)
    for place, entry in enumerate(order):
        words |= fields[..., entry] << (4 * place)
    # Two's complement: the top field reaches the sign bit.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _unpack(words: Tensor, order: tuple[int, ...]) -> Tensor:
    fields = torch.empty(*words.shape, _PER_WORD, dtype=torch.int64)
    for place, entry in enumerate(order):
        fields[..., entry] = (words.to(torch.int64) >> (4 * place)) & _HIGHEST
    return fields.flatten(-2)


_IN_ORDER = tuple(range(_PER_WORD))


def pack(weight: Tensor, group_size: int, layout: Layout) -> dict[str, Tensor]:
    """Quantise and pack one linear layer's weight (out, in); keys are the tensors' suffixes in a checkpoint."""
    levels, zeros, scales = (t.cpu() for t in to_levels(weight, group_size, layout))
    flat, zeros_t = levels.flatten(1), zeros.squeeze(-1).T
    packed = {"scales": scales.squeeze(-1).T.half().contiguous()}
    if layout == "gptq":
        packed["qweight"] = _pack(flat, _IN_ORDER).T.contiguous()
        packed["qzeros"] = _pack(zeros_t - 1, _IN_ORDER).contiguous()
        packed["g_idx"] = torch.arange(flat.shape[1], dtype=torch.int32) // group_size
    else:
        packed["qweight"] = _pack(flat.T, _AWQ_ORDER).contiguous()
        packed["qzeros"] = _pack(zeros_t, _AWQ_ORDER).contiguous()
    return packed


def unpack(packed: dict[str, Tensor], layout: Layout) -> Tensor:
    """Return the weight, float32 (out, in), that packed tensors stand for: the plain reference of both layouts."""
    scales = packed["scales"].float()
    if layout == "gptq":
        levels = _unpack(packed["qweight"].T.contiguous(), _IN_ORDER).T
        zeros = _unpack(packed["qzeros"], _IN_ORDER) + 1
    else:
        levels = _unpack(packed["qweight"], _AWQ_ORDER)
        zeros = _unpack(packed["qzeros"], _AWQ_ORDER)
    group_size = levels.shape[0] // scales.shape[0]
    spread = (levels - zeros.repeat_interleave(group_size, 0)).float() * scales.repeat_interleave(group_size, 0)
    return spread.T.contiguous()
