"""Chooses the implementation of a linear layer, once, by what the file holds, the device and the option asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.int4 import ALTERNATING, Int4Weight, alternate
from engine.kernels.int4_fp8 import supports_fp8
from engine.layers.linear import DenseLinear, ExactQuantLinear, GatedLinear, Linear, StackedLinear
from engine.layers.linear_gpu import Fp8RowsLinear, GpuInt4Linear
from engine.layers.linear_int4 import Int4Linear
from engine.layers.linear_int8 import Int8Linear, is_int8_exact
from engine.layers.quant import QuantWeight, can_concatenate, concatenate

CpuCompute = Literal["auto", "int8", "int4", "exact"]
Activations = Literal["auto", "fp8"]

# Below this many weights a float32 product of one row is quicker than quantising the row: see docs of the bench.
SMALL_WEIGHTS = 3 << 15


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Holds one projection as read: dense (out, in) in its file dtype, or quantised."""

    weight: Tensor | QuantWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LinearFactory:
    """Makes linear layers for one model.

    Parameters
    ----------
    cpu_compute : how 4-bit weights are multiplied on a CPU. ``int8``: requantised once to int8 per output channel,
        multiplied with rows quantised to int8 on the fly (twice the memory of 4 bits, several times faster than the
        others, about 1 % noise per layer). ``int4``: kept in 4 bits, bfloat16
        arithmetic. ``exact``: kept in 4 bits, dequantised for each call. ``auto``: int8 where the machine computes it
        without overflow, else int4; small matrices float32. Dense weights stay dense unless ``int8`` is asked for by
        name.
    activations : what 4-bit weights are multiplied with on a GPU. ``fp8``: rows of which there are many are rounded to
        8 bits first, where the kernels take the weight (:mod:`engine.kernels.int4_fp8`); ``auto``: all in ``dtype``
    """

    dtype: torch.dtype
    device: torch.device
    cpu_compute: CpuCompute = "auto"
    activations: Activations = "auto"

    def build(self, parts: list[LinearPart]) -> Linear:
        """Build one layer that computes ``parts``, which read the same input, side by side."""
        bias = self._bias(parts)
        dense = [part.weight for part in parts if isinstance(part.weight, Tensor)]
        packed = [part.weight for part in parts if isinstance(part.weight, QuantWeight)]
        if len(dense) == len(parts):
            return self._dense(torch.cat(dense) if len(dense) > 1 else dense[0], bias)
        if len(packed) == len(parts) and can_concatenate(packed):
            return self._packed(concatenate(packed) if len(packed) > 1 else packed[0], bias)
        return StackedLinear([self.build([part]) for part in parts])

    def build_gated(self, gate: LinearPart, up: LinearPart) -> Linear:
        """Build one layer that computes ``silu(gate) * up``."""
        parts = [gate, up]
        packed = [part.weight for part in parts if isinstance(part.weight, QuantWeight)]
        if not self._has_gated_kernel(packed):
            return GatedLinear(self.build(parts))
        bias = self._bias(parts)
        weight = concatenate(packed).to(self.device)
        return self._repacked(weight, None if bias is None else alternate(bias), is_gated=True)

    def _has_gated_kernel(self, packed: list[QuantWeight]) -> bool:
        """Tell whether a program takes gate and up at once: both in 4 bits alike, in widths that it knows."""
        return (
            self.device.type != "cpu"
            and len(packed) == 2
            and can_concatenate(packed)
            and packed[0].out_features % ALTERNATING == 0
            and GpuInt4Linear.supports(packed[0], self.dtype)
        )

    def _bias(self, parts: list[LinearPart]) -> Tensor | None:
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), "projections of one layer have biases together or not at all"
        return torch.cat(biases).to(device=self.device, dtype=self.dtype) if biases else None

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if self.device.type == "cpu" and self.cpu_compute == "int8" and is_int8_exact():
            return Int8Linear.from_float(weight.float(), bias)
        return DenseLinear(weight.to(device=self.device, dtype=self.dtype).contiguous(), bias)

    def _packed(self, weight: QuantWeight, bias: Tensor | None) -> Linear:
        if self.device.type != "cpu":
            weight = weight.to(self.device)
            if not GpuInt4Linear.supports(weight, self.dtype):
                return ExactQuantLinear(weight, bias)
            return self._repacked(weight, bias)
        if self.cpu_compute == "exact":
            return ExactQuantLinear(weight, bias)
        if self.cpu_compute == "auto" and weight.out_features * weight.in_features <= SMALL_WEIGHTS:
            return DenseLinear(weight.dequantize(self.dtype), bias)
        if self.cpu_compute == "int4" or not is_int8_exact():
            return Int4Linear(weight, bias) if Int4Linear.supports(weight) else ExactQuantLinear(weight, bias)
        return Int8Linear.from_float(weight.dequantize(torch.float32), bias)

    def _repacked(self, weight: QuantWeight, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        repacked = Int4Weight.repack(weight, is_gated=is_gated)
        kind = Fp8RowsLinear if self.activations == "fp8" and supports_fp8(repacked) else GpuInt4Linear
        return kind(repacked, bias)
