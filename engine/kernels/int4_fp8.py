"""Multiplies 4-bit weights with activations rounded to 8-bit floats ("W4A8"): twice the rate, for a loss measured.

Of 128 inputs, the least that share a scale, products are summed by the matrix unit; the sums of such groups are scaled
and added in float32. Weights stay in the layout of :mod:`engine.kernels.int4`, the very same tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.dispatch import runs_on_gpu
from engine.kernels.fp8 import quantize_rows_reference
from engine.kernels.int4 import Int4Weight, int4_linear_reference

# From here on 16-bit activations make the matrix unit the bottleneck.
LEAST_ROWS = 49


def supports_fp8(weight: Int4Weight) -> bool:
    """Tell whether the program takes the weight: one scale for 128 inputs or more, and widths that 8 divides."""
    return weight.groups_per_unit == 1 and weight.in_features % 8 == 0 and weight.out_features % 8 == 0


def int4_fp8_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``round(x) @ W.T + bias``, (M, K) → (M, out_features), in ``x``'s dtype, each row rounded by its largest
    magnitude; gated if the weight is.

    Parameters
    ----------
    x : (M, K), bfloat16 or float16 on a GPU
    weight : one that :func:`supports_fp8`
    bias : (N,) in ``x``'s dtype
    """
    if runs_on_gpu(x):
        from engine.kernels.cuda_int4_fp8 import int4_fp8_linear_cuda

        return int4_fp8_linear_cuda(x, weight, bias)
    return int4_fp8_linear_reference(x, weight, bias)


def int4_fp8_linear_reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`int4_fp8_linear` in plain torch: activations rounded alike, exact weights, one last rounding.

    Sums are taken in float32, or in float64 if ``x`` is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    data, factors = quantize_rows_reference(x)
    rounded = data.to(wide) * factors.to(wide)
    return int4_linear_reference(rounded, weight, None if bias is None else bias.to(wide)).to(x.dtype)
