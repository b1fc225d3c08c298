"""Holds group-quantised 4-bit weights in one layout, whatever file format they came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack uint8 codes 0..15, (..., n) with n even, to (..., n / 2): the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo :func:`pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """Holds ``W[o, i] = (code[o, i] - zero[o, g]) * scale[o, g]`` with ``g = i' // group_size``.

    Attributes
    ----------
    packed : uint8 (out, in / 2), codes two to a byte along the input, in group order
    scales : float (out, groups), in the file's dtype
    zeros : uint8 (out, groups), 0..15
    group_size : input features per group; the last group may be short
    order : int64 (in,) or None. Activation-ordered GPTQ files scatter a group's inputs; ``order[i']`` is the original
        index of the i'-th input in group order.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    order: Tensor | None = None

    @property
    def out_features(self) -> int:
        return int(self.packed.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.packed.shape[1]) * 2

    @property
    def nbytes(self) -> int:
        tensors = (self.packed, self.scales, self.zeros, self.order)
        return sum(t.nbytes for t in tensors if t is not None)

    def codes(self) -> Tensor:
        """Return the codes, uint8 (out, in), in group order."""
        return unpack_nibbles(self.packed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (out, in) in the original input order; the product is taken in ``dtype``."""
        grouped = self.codes().to(torch.int16) - self._per_input(self.zeros).to(torch.int16)
        weight = grouped.to(dtype) * self._per_input(self.scales.to(dtype))
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _per_input(self, per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]

    def to(self, device: torch.device | str) -> QuantWeight:
        order = None if self.order is None else self.order.to(device)
        return QuantWeight(
            self.packed.to(device), self.scales.to(device), self.zeros.to(device), self.group_size, order
        )

    @classmethod
    def from_codes(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, order: Tensor | None = None
    ) -> QuantWeight:
        """Pack codes (out, in), which are in group order already."""
        packed = pack_nibbles(codes.to(torch.uint8)).contiguous()
        return cls(packed, scales.contiguous(), zeros.to(torch.uint8).contiguous(), group_size, order)


def can_concatenate(weights: list[QuantWeight]) -> bool:
    """Tell whether weights that read one input can become one: same groups, same input order."""
    first = weights[0]
    for other in weights[1:]:
        if other.group_size != first.group_size or (other.order is None) != (first.order is None):
            return False
        if other.order is not None and first.order is not None and not torch.equal(other.order, first.order):
            return False
    return True


def concatenate(weights: list[QuantWeight]) -> QuantWeight:
    """Stack along the output; ``can_concatenate`` must hold."""
    first = weights[0]
    return QuantWeight(
        torch.cat([w.packed for w in weights]),
        torch.cat([w.scales for w in weights]),
        torch.cat([w.zeros for w in weights]),
        first.group_size,
        first.order,
    )
