"""Multiplies 4-bit weights as they are on the CPU, by PyTorch's weight-only kernel with bfloat16 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.quant import QuantWeight

GROUP_SIZES = (32, 64, 128, 256)


class Int4Linear:
    """Computes ``x @ W.T + bias`` with 4-bit codes, bfloat16 scales and activations; half a byte a weight.

    The kernel's own float32-activation path is scalar code, hence bfloat16: about 0.4 % noise per layer.
    """

    def __init__(self, weight: QuantWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bias = bias
        self.group_size = weight.group_size
        self.order = weight.order
        self._codes = torch._convert_weight_to_int4pack_for_cpu(weight.codes().to(torch.int32), 1)
        # The kernel computes (code - 8) * scale + offset.
        scales = weight.scales.float()
        offsets = (8.0 - weight.zeros.float()) * scales
        self._scales_and_offsets = torch.stack((scales.t(), offsets.t()), dim=-1).to(torch.bfloat16).contiguous()

    @staticmethod
    def supports(weight: QuantWeight) -> bool:
        """Tell whether the kernel takes this shape and group size."""
        whole_groups = weight.in_features % weight.group_size == 0
        return weight.group_size in GROUP_SIZES and whole_groups and weight.out_features % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.to(torch.bfloat16)
        if self.order is not None:
            rows = rows.index_select(-1, self.order)
        out = torch._weight_int4pack_mm_for_cpu(rows, self._codes, self.group_size, self._scales_and_offsets).to(
            x.dtype
        )
        return out if self.bias is None else out.add_(self.bias)

    @property
    def weight_bytes(self) -> int:
        tensors = (self._codes, self._scales_and_offsets, self.bias, self.order)
        return sum(t.nbytes for t in tensors if t is not None)
