"""Linear layers behind one seam: whatever holds the weights, ``layer(x)`` is ``x @ W.T + bias``.

The implementation is chosen once, at load (:mod:`engine.load.linear`); the decoder knows only :class:`Linear`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.quant import QuantWeight


class Linear(Protocol):
    """``x`` (T, in_features) → (T, out_features), same dtype. A row's result does not depend on the other rows."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes held for the weights, scales and bias included."""


class DenseLinear:
    """Weights as they are multiplied: (out, in), float32, bfloat16 or float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ExactQuantLinear:
    """Packed 4-bit weights, dequantised for every call: slow, exact, any device. The reference of the fast ones."""

    def __init__(self, weight: QuantWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.out_features, weight.in_features

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class StackedLinear:
    """Several layers that read the same input, where their weights cannot be laid into one."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)
