"""Reads AWQ's GEMM layout: eight 4-bit codes of neighbouring *outputs* in each int32, in an interleaved order."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import QuantConfig
from engine.errors import UnsupportedQuantization
from engine.layers.quant import QuantWeight
from engine.load.tensors import TensorSource

# The nibble at bits 4k..4k+3 of a word holds output AWQ_ORDER[k] of its eight (Lin et al. 2023; AutoAWQ's GEMM kernel).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 (rows, n / 8) into uint8 (rows, n)."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = ((words[..., None] >> shifts) & 15).to(torch.uint8)
    inverse = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return nibbles[..., inverse].flatten(-2)


def read_awq(files: TensorSource, name: str, in_features: int, out_features: int, quant: QuantConfig) -> QuantWeight:
    """Read ``name.qweight``, ``.qzeros`` and ``.scales``."""
    group_size = in_features if quant.group_size == -1 else quant.group_size
    if in_features % group_size or out_features % 8:
        raise UnsupportedQuantization(
            f"{files.folder}: {name} is {in_features} x {out_features}; AWQ needs inputs in whole groups of "
            f"{group_size} and outputs in eights.",
            method="awq",
            path=files.folder,
        )
    groups = in_features // group_size
    codes = unpack_awq(files.take(f"{name}.qweight", (in_features, out_features // 8)))
    zeros = unpack_awq(files.take(f"{name}.qzeros", (groups, out_features // 8)))
    scales = files.take_float(f"{name}.scales", (groups, out_features))
    return QuantWeight.from_codes(codes.t(), scales.t(), zeros.t(), group_size)
