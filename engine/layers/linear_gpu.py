"""Multiplies 4-bit weights as they are on a GPU, by our own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.int4 import Int4Weight, int4_linear
from engine.kernels.int4_fp8 import LEAST_ROWS, int4_fp8_linear
from engine.layers.quant import QuantWeight


class GpuInt4Linear:
    """Computes ``x @ W.T + bias`` with 4-bit codes and 16-bit activations in float32; see :mod:`engine.kernels.int4`.

    Parameters
    ----------
    weight : if it is gated, so is what the layer gives
    bias : (N,), in the order of the weight's rows
    """

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.out_features, weight.in_features

    @staticmethod
    def supports(weight: QuantWeight, dtype: torch.dtype) -> bool:
        """Tell whether the kernels take this group size and activations of this type."""
        return dtype in (torch.bfloat16, torch.float16) and Int4Weight.supports(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return int4_linear(x, self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Fp8RowsLinear(GpuInt4Linear):
    """Works as :class:`GpuInt4Linear`, but many rows are rounded to 8 bits first; see :mod:`engine.kernels.int4_fp8`.

    A row's result so depends on whether it is one of many: the answer is then that of a slightly noisier layer.
    """

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] < LEAST_ROWS:
            return super().__call__(x)
        return int4_fp8_linear(x, self.weight, self.bias)
