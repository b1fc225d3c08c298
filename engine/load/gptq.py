"""Reads GPTQ checkpoints: eight 4-bit codes of neighbouring *inputs* in each int32, groups per input by ``g_idx``."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.config import QuantConfig
from engine.errors import TensorMismatch, UnsupportedQuantization
from engine.layers.quant import QuantWeight
from engine.load.tensors import TensorSource


def unpack_rows(words: Tensor) -> Tensor:
    """Unpack int32 (n / 8, columns) into uint8 (n, columns)."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)[None, :, None]
    return ((words[:, None, :] >> shifts) & 15).to(torch.uint8).flatten(0, 1)


def read_gptq(files: TensorSource, name: str, in_features: int, out_features: int, quant: QuantConfig) -> QuantWeight:
    """Read ``name.qweight``, ``.qzeros``, ``.scales`` and, where it is written, ``.g_idx``."""
    group_size = in_features if quant.group_size == -1 else quant.group_size
    if in_features % 8 or out_features % 8:
        raise UnsupportedQuantization(
            f"{files.folder}: {name} is {in_features} x {out_features}; GPTQ packs inputs and outputs in eights.",
            method="gptq",
            path=files.folder,
        )
    groups = -(-in_features // group_size)
    codes = unpack_rows(files.take(f"{name}.qweight", (in_features // 8, out_features)))
    zeros = unpack_rows(files.take(f"{name}.qzeros", (groups, out_features // 8)).t()).t()
    if quant.zeros_minus_one:
        # The first file format stores zero - 1; its own kernels wrap 15 + 1 to 0, so a zero point of 0 survives.
        zeros = (zeros + 1) & 15
    scales = files.take_float(f"{name}.scales", (groups, out_features))
    order = _input_order(files, name, in_features, group_size)
    if order is not None:
        codes = codes.index_select(0, order)
    return QuantWeight.from_codes(codes.t(), scales.t(), zeros.t(), group_size, order)


def _input_order(files: TensorSource, name: str, in_features: int, group_size: int) -> Tensor | None:
    """Return the permutation that makes groups contiguous, None when they already are.

    Raises
    ------
    TensorMismatch
        ``g_idx`` does not give every group its share of inputs.
    """
    key = f"{name}.g_idx"
    if key not in files:
        return None
    group_of_input = files.take(key, (in_features,)).to(torch.int64)
    expected = torch.arange(in_features, device=group_of_input.device) // group_size
    if torch.equal(group_of_input, expected):
        return None
    ordered, order = torch.sort(group_of_input, stable=True)
    if not torch.equal(ordered, expected):
        raise TensorMismatch(
            f"{files.folder}: {key} must name each of {int(expected[-1]) + 1} groups {group_size} times.",
            tensor=key,
            path=files.folder,
        )
    return order
