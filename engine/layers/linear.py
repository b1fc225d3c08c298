"""Puts linear layers behind one seam: whatever holds the weights, ``layer(x)`` is ``x @ W.T + bias``.

The implementation is chosen once, at load (:mod:`engine.load.linear`); the decoder knows only :class:`Linear`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.fused import silu_and_mul
from engine.layers.quant import QuantWeight


class Linear(Protocol):
    """Maps ``x`` (T, in_features) to (T, out_features), same dtype. No row's result depends on another row."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor: ...

    @property
    def weight_bytes(self) -> int:
        """Return the bytes held for the weights, scales and bias included."""


class DenseLinear:
    """Holds weights as they are multiplied: (out, in), float32, bfloat16 or float16."""

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
    """Dequantises packed 4-bit weights for every call: slow, exact, any device. The reference of the fast ones."""

    def __init__(self, weight: QuantWeight, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.out_features, weight.in_features

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class GatedLinear:
    """Computes ``silu(gate) * up`` (Shazeer 2020, eq. 6) of a layer that gives both side by side, the gate first."""

    def __init__(self, gate_up: Linear) -> None:
        self.gate_up = gate_up
        self.in_features = gate_up.in_features
        self.out_features = gate_up.out_features // 2

    def __call__(self, x: Tensor) -> Tensor:
        return silu_and_mul(self.gate_up(x))

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.weight_bytes


class StackedLinear:
    """Stacks several layers that read the same input, where their weights cannot be laid into one."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)
