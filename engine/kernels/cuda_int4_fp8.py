"""Rounds rows to 8-bit floats and launches ``int4_fp8.cu``, which multiplies them with 4-bit weights."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cuda_int4_many import (
    THREADS,
    TileArguments,
    TileCut,
    choose_plan,
    describe_problem,
    describe_tile,
    fit_stages,
    num_multiprocessors,
)
from engine.kernels.fp8 import FP8, FP8_MAX, TINY
from engine.kernels.int4 import ROWS, UNIT, Int4Weight
from engine.kernels.nvrtc import Kernel, load_kernel

SOURCE = "int4_fp8.cu"
OCTET = 8  # units whose sums lie together
CHUNK = 16  # inputs that a thread of quantize_fp8.cu reads at once
CHUNK_THREADS = 512  # of a thread block, at most
# Units of whole tiles were fitted to 40 timings of matrices of 8B and 70B at 64 to 2,048 rows, what splitting adds is
# that of 16-bit activations (``--sweep activations``).
CUTS = (
    TileCut(16, 2, 0.995, 1.12, 11.1),
    TileCut(12, 2, 0.895, 0.94, 9.7),
    TileCut(8, 2, 0.785, 0.785, 7.4),
    TileCut(16, 1, 0.67, 0.7, 7.1),
)


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Holds activations as ``int4_fp8.cu`` wants them.

    Attributes
    ----------
    data : float8_e4m3fn (M, 128 * units), past K zeros; within 16 inputs 2t, 2t + 8, 2t + 1 and 2t + 9 lie at 4t
    sums : float32 of 11 bits (octets, stride / 8, 2, 8, 4), of each 128 rounded inputs: that of row ``8 i + j`` and
        unit ``8 o + 4 h + k`` at (o, i, h, j, k)
    factors : float32 (stride,), that a row was divided by
    stride : M, padded
    """

    data: Tensor
    sums: Tensor
    factors: Tensor
    stride: int


class _RowArguments(ctypes.Structure):
    # As in quantize_fp8.cu.
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "data", "sums", "factors")),
        *((name, ctypes.c_int) for name in ("K", "U", "stride")),
        *((name, ctypes.c_float) for name in ("largest", "least")),
    )


class _ByteTileArguments(TileArguments):
    # As in int4_fp8.cu; the tensor maps' alignment of 64 rounds the size up.
    _fields_ = (
        ("sums", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("stride", ctypes.c_int),
        ("padding", ctypes.c_byte * 44),
    )


def int4_fp8_linear_cuda(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Launch :func:`engine.kernels.int4_fp8.int4_fp8_linear` on a Hopper GPU."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return rounded_linear(round_rows(x), weight, bias, x.dtype)


def rounded_linear(
    rows: RoundedRows, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype, cut: TileCut | None = None
) -> Tensor:
    """Return the product of rows in the layout's input order, in ``dtype``, a half type, by ``cut`` or the best."""
    num_rows, device = rows.data.shape[0], rows.data.get_device()
    out = torch.empty(num_rows, weight.out_features, dtype=dtype, device=rows.data.device)
    blocks, units = weight.codes.shape[:2]
    plan = choose_plan(num_rows, blocks, units, num_multiprocessors(device), CUTS if cut is None else (cut,))
    problem = describe_problem(rows.data, weight, bias, out, plan)
    told = _ByteTileArguments.from_buffer_copy(bytes(problem).ljust(ctypes.sizeof(_ByteTileArguments), b"\0"))
    told.sums, told.factors, told.stride = rows.sums.data_ptr(), rows.factors.data_ptr(), rows.stride
    kernel = _kernels(dtype == torch.bfloat16, weight.is_gated, device)[plan.cut]
    kernel.launch((plan.grid, 1), THREADS, [told], torch.cuda.current_stream(device).cuda_stream, early=True)
    return out


def round_rows(x: Tensor) -> RoundedRows:
    """Round halves (M, K) by their rows' largest magnitudes: :func:`engine.kernels.fp8.quantize_rows` but for ties."""
    num_rows, inputs = x.shape
    units = -(-inputs // UNIT)
    # Whole 8s, and a tile past the last row may be read, for sums that are then not kept.
    stride = -(-num_rows // 8) * 8 + ROWS
    octets = -(-units // OCTET)
    data = torch.empty(num_rows, units * UNIT, dtype=FP8, device=x.device)
    sums = torch.empty(octets, stride // 8, 2, 8, 4, dtype=torch.float32, device=x.device)
    factors = torch.empty(stride, dtype=torch.float32, device=x.device)
    device = x.get_device()
    chunks, threads = count_chunks(octets * OCTET)
    told = _RowArguments(
        x.data_ptr(), data.data_ptr(), sums.data_ptr(), factors.data_ptr(), inputs, units, stride, FP8_MAX, TINY
    )
    kernel = _rounding(chunks, x.dtype == torch.bfloat16, device)
    kernel.launch((num_rows, 1), threads, [told], torch.cuda.current_stream(device).cuda_stream, early=True)
    return RoundedRows(data, sums, factors, stride)


def count_chunks(units: int) -> tuple[int, int]:
    """Return the chunks that a thread holds, and threads, for a row of ``units``."""
    needed = units * UNIT // CHUNK
    chunks = -(-needed // CHUNK_THREADS)
    return chunks, math.ceil(needed / chunks / 32) * 32


def stage_bytes(cut: TileCut) -> int:
    """Return the bytes of one stage of the ring: codes, activations, scales, sums (``STAGE_BYTES``)."""
    return cut.blocks * (64 * ROWS + 512) + 8 * cut.tiles * (UNIT + 4 * OCTET)


@functools.cache
def _kernels(is_bf16: bool, is_gated: bool, device: int) -> dict[TileCut, Kernel]:
    """Return the programs for all ``CUTS``, compiled at once: row counts come unforeseen, in the midst of serving."""
    kernels: dict[TileCut, Kernel] = {}
    for cut in CUTS:
        stages, shared = fit_stages(stage_bytes(cut))
        defines = describe_tile(cut, stages, is_bf16, is_gated)
        kernels[cut] = load_kernel(SOURCE, "int4_fp8", tuple(defines.items()), shared, device)
    return kernels


@functools.cache
def _rounding(chunks: int, is_bf16: bool, device: int) -> Kernel:
    defines = {"CHUNKS": chunks, "IS_BF16": int(is_bf16)}
    return load_kernel("quantize_fp8.cu", "quantize_fp8", tuple(defines.items()), 0, device)
