"""Holds 4-bit weights on a GPU in one layout that both the matrix units and the memory like, repacked once at load.

A matrix unit's instruction multiplies 16 rows by 16 inputs; lane ``4 * g + t`` of a warp holds eight of those weights.
They are stored as the lanes want them: a lane's eight weights of one instruction are one int32, its four words of four
instructions lie side by side, so a warp reads 512 bytes in one go and nothing is shuffled afterwards.

::

    block of 128 rows ─► unit of 128 inputs ─► tile of 16 rows ─► half of 64 inputs ─► lane ─► 4 words
    row   = 128 block + 16 tile + 8 h + g        nibble of the word = h + 2 b + 4 e
    input = 128 unit + 64 half + 16 word + 8 b + 2 t + e

A lane that multiplies has the sums of rows g and g + 8. Where these are a gate and what it gates, it can apply the
one to the other before anything is written: so gated weights are laid out, eight rows of each in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UnsupportedQuantization
from engine.kernels.dispatch import runs_on_gpu
from engine.layers.quant import QuantWeight, pack_nibbles, unpack_nibbles

ROWS = 128  # of a block; out_features are padded up to a multiple
UNIT = 128  # inputs of a unit; in_features are padded up to a multiple
MIN_GROUP = 32
ALTERNATING = 8  # rows of the gate, then as many that it gates

# Rows repacked at once, so that a 70B projection's temporaries stay under a gigabyte.
_REPACK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Holds ``W[o, i] = (code[o, i] - zero[o, g]) * scale[o, g]`` in the kernels' layout.

    Products with a gated weight are ``silu(gate) * up`` (Shazeer 2020, eq. 6), half as many outputs as it has rows.

    Attributes
    ----------
    codes : int32 (blocks, units, 8, 2, 32, 4), as drawn above
    scales : int32 (blocks, units, groups per unit, 8, 8, 2): per tile, lane group g and h one float32 whose four lowest
        bits are the zero point. 20 bits of mantissa are kept, exact for float16 and bfloat16 scales.
    num_rows, in_features : N, K, unpadded
    order : int64 (K,) or None; input i' of the layout is input ``order[i']`` of the layer (activation-ordered GPTQ)
    is_gated : whether ``ALTERNATING`` rows of a gate and as many that it gates lie in turn
    """

    codes: Tensor
    scales: Tensor
    num_rows: int
    in_features: int
    order: Tensor | None = None
    is_gated: bool = False

    @property
    def out_features(self) -> int:
        return self.num_rows // 2 if self.is_gated else self.num_rows

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.order is None else self.order.nbytes)

    @property
    def groups_per_unit(self) -> int:
        return int(self.scales.shape[2])

    @staticmethod
    def supports(weight: QuantWeight) -> bool:
        """Tell whether the layout can hold it: groups whose size shares a factor of 32 or more with 128."""
        return math.gcd(weight.group_size, UNIT) >= MIN_GROUP or weight.group_size >= weight.in_features

    @classmethod
    def repack(cls, weight: QuantWeight, *, is_gated: bool = False) -> Int4Weight:
        """Lay out a loaded weight, on the device it lies on; a 70B layer takes milliseconds on a GPU.

        Parameters
        ----------
        is_gated : lay its rows, gate first, in turn (:func:`alternate`)

        Raises
        ------
        UnsupportedQuantization
            Groups the layout cannot hold; see :meth:`supports`.
        """
        if not cls.supports(weight):
            raise UnsupportedQuantization(
                f"Groups of {weight.group_size} inputs have no layout for the GPU kernels; a size that shares a "
                f"factor of {MIN_GROUP} with {UNIT} has.",
                method="int4",
            )
        if is_gated:
            packed, scales, zeros = (alternate(rows) for rows in (weight.packed, weight.scales, weight.zeros))
            weight = replace(weight, packed=packed, scales=scales, zeros=zeros)
        size = weight.group_size if weight.group_size < weight.in_features else UNIT
        group = math.gcd(size, UNIT)
        zeros, scales = (_per_group(t, weight, group) for t in (weight.zeros, weight.scales))
        words, packed_scales = [], []
        for first in range(0, weight.out_features, _REPACK_ROWS):
            rows = slice(first, first + _REPACK_ROWS)
            words.append(_pack_codes(_pad(unpack_nibbles(weight.packed[rows]), ROWS, UNIT)))
            packed_scales.append(_pack_scales(scales[rows], zeros[rows], group))
        codes, packed = torch.cat(words), torch.cat(packed_scales)
        return cls(codes, packed, weight.out_features, weight.in_features, weight.order, is_gated)

    @classmethod
    def random(
        cls,
        num_rows: int,
        in_features: int,
        *,
        is_gated: bool = False,
        device: torch.device | str,
        generator: torch.Generator | None = None,
    ) -> Int4Weight:
        """Draw random codes, zero points 8 and groups of 128, scaled so that outputs have about the inputs' size."""
        blocks, units = -(-num_rows // ROWS), -(-in_features // UNIT)
        shape = (blocks, units, 8, 2, 32, 4)
        codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)
        scale = torch.full((blocks, units, 1, 8, 8, 2), 1.0 / (4.6 * math.sqrt(in_features)), device=device)
        return cls(codes, (scale.view(torch.int32) & ~15) | 8, num_rows, in_features, None, is_gated)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (N, K), rows as in the layout, inputs as in the layer; code times scale in float32, rounded once."""
        codes = _unpack_codes(self.codes)
        scales = (self.scales & ~15).view(torch.float32).permute(0, 3, 5, 4, 1, 2).flatten(4).flatten(0, 3)
        zeros = (self.scales & 15).permute(0, 3, 5, 4, 1, 2).flatten(4).flatten(0, 3)
        group = UNIT // self.groups_per_unit
        exact = (codes.float() - _widen(zeros.float(), group)) * _widen(scales, group)
        weight = exact[: self.num_rows, : self.in_features].to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ W.T + bias``, (M, K) → (M, out_features), in ``x``'s dtype, summed in float32; gated if ``W`` is.

    Parameters
    ----------
    x : (M, K) contiguous, bfloat16 or float16 on a GPU
    bias : (N,) in ``x``'s dtype, in the layout's order of rows
    """
    if runs_on_gpu(x):
        from engine.kernels.cuda_int4 import int4_linear_cuda

        return int4_linear_cuda(x, weight, bias)
    return int4_linear_reference(x, weight, bias)


def int4_linear_reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`int4_linear` in plain torch: weights in float32, one rounding at the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = F.linear(x.to(wide), weight.dequantize(wide), None if bias is None else bias.to(wide))
    return (gate_alternating(rows) if weight.is_gated else rows).to(x.dtype)


def alternate(rows: Tensor) -> Tensor:
    """Turn (N, ...) that holds a gate's rows and then as many that it gates into ``ALTERNATING`` of each in turn."""
    return rows.view(2, -1, ALTERNATING, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def gate_alternating(rows: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of (M, N) outputs that alternate; (M, N / 2)."""
    gate, up = rows.view(len(rows), -1, 2, ALTERNATING).unbind(2)
    return (F.silu(gate) * up).flatten(1)


# Packing


def _per_group(values: Tensor, weight: QuantWeight, group: int) -> Tensor:
    """Turn (N, groups of the file) into (N, groups of ``group`` inputs)."""
    per_file_group = -(-weight.group_size // group)
    return _widen(values, per_file_group)[:, : -(-weight.in_features // group)]


def _widen(values: Tensor, times: int) -> Tensor:
    return values.repeat_interleave(times, dim=1)


def _pad(values: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))


def _pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 (rows, inputs), padded, into int32 (blocks, units, 8, 2, 32, 4)."""
    blocks, units = codes.shape[0] // ROWS, codes.shape[1] // UNIT
    #                   block  tile h  g   unit  half word b  t  e
    split = codes.view(blocks, 8, 2, 8, units, 2, 4, 2, 4, 2)
    # → block, unit, tile, half, g, t, word, then the nibbles: e slowest, h fastest
    nibbles = split.permute(0, 4, 1, 5, 3, 8, 6, 9, 7, 2).reshape(blocks, units, 8, 2, 32, 4, 8)
    return pack_nibbles(nibbles).view(torch.int32).squeeze(-1)


def _unpack_codes(words: Tensor) -> Tensor:
    """Undo :func:`_pack_codes`."""
    blocks, units = words.shape[0], words.shape[1]
    nibbles = unpack_nibbles(words.unsqueeze(-1).view(torch.uint8))
    #                      block  unit  tile half g t word e  b  h
    split = nibbles.view(blocks, units, 8, 2, 8, 4, 4, 2, 2, 2)
    return split.permute(0, 2, 9, 4, 1, 3, 6, 8, 5, 7).reshape(blocks * ROWS, units * UNIT)


def _pack_scales(scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Pack (rows, groups) each into int32 (blocks, units, groups per unit, 8, 8, 2)."""
    per_unit = UNIT // group
    bits = _pad(scales.float(), ROWS, per_unit).view(torch.int32)
    words = (bits & ~15) | _pad(zeros.to(torch.int32), ROWS, per_unit)
    split = words.view(words.shape[0] // ROWS, 8, 2, 8, -1, per_unit)
    return split.permute(0, 4, 5, 1, 3, 2).contiguous()
