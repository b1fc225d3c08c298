"""Which program multiplies 4-bit weights, by the number of rows, and its launch.

===========  ===================================================================================================
rows         path
===========  ===================================================================================================
up to 128    ``int4.cu``; a row has the same bits among 1 to 16 rows, and among 17 to 64
up to 256    the same twice, for large matrices
more         weights written out as halves, some at a time so that they stay in the L2 cache, then the library's
             matrix product
===========  ===================================================================================================
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.int4 import ROWS, Int4Weight
from engine.kernels.nvrtc import Kernel, describe_matrix, load_kernel
from engine.kernels.workspace import workspace_of

SOURCE = "int4.cu"
THREADS = 256  # that multiply or write
STREAM_THREADS = THREADS + 32  # one warp more copies
SLICE_ROWS = 128  # most rows of one launch
MAX_SLICED_ROWS = 256
SLICED_WORDS = 6_000_000  # from 48 million weights on, two launches beat writing them out
MAX_STAGES = 8
SHARED_KIB = 112  # two thread blocks fit a multiprocessor
EXCLUSIVE_KIB = 120  # one does
CONTROL_BYTES = 256  # at least a ``Control`` of that many stages
DEQUANTIZED_BYTES = 64 << 20  # written out at once


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How the streaming kernel cuts a matrix; on an H200 the defaults were best, or within 4 %, for every Llama shape.

    Parameters
    ----------
    row_tiles : tiles of 16 weight rows that a warp holds at once, 1 or 2
    blocks_per_sm : thread blocks launched per multiprocessor
    shared_kib : shared memory of a thread block; None takes ``EXCLUSIVE_KIB`` for a kernel that starts early, so that a
        multiprocessor never holds two of its blocks while another holds none, and ``SHARED_KIB`` otherwise
    early : start before the kernel ahead has ended. A captured 70B layer at one row takes 151 us early, 161 late, and
        238 early where two blocks may share a multiprocessor; an 8B layer 65, 73 and 84.
    """

    row_tiles: int = 2
    blocks_per_sm: int = 1
    shared_kib: int | None = None
    early: bool = True


class _Problem(ctypes.Structure):
    # As in int4.cu; the tensor map's alignment of 64 rounds the size up to 256.
    _fields_ = (
        ("x", ctypes.c_byte * 128),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "bias", "y", "partials", "arrived")),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "U", "B")),
        ("padding", ctypes.c_byte * 60),
    )


def int4_linear_cuda(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, config: StreamConfig | None = None
) -> Tensor:
    """:func:`engine.kernels.int4.int4_linear` on a GPU."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    if not _has_programs(x.get_device()):
        return torch.nn.functional.linear(x, _unordered(weight).dequantize(x.dtype), bias)
    is_many = x.shape[0] > (MAX_SLICED_ROWS if weight.codes.numel() >= SLICED_WORDS else SLICE_ROWS)
    if is_many or weight.in_features % 8 or x.dtype not in (torch.bfloat16, torch.float16):
        return dequantized_linear(x, weight, bias)
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    for first in range(0, x.shape[0], SLICE_ROWS):
        _stream(x[first : first + SLICE_ROWS], weight, bias, out[first : first + SLICE_ROWS], config)
    return out


def _stream(x: Tensor, weight: Int4Weight, bias: Tensor | None, out: Tensor, config: StreamConfig | None) -> None:
    blocks, units = weight.codes.shape[:2]
    config = config or StreamConfig()
    tiles = next(tiles for tiles in (1, 2, 4, 8, 16) if 8 * tiles >= x.shape[0])
    row_tiles = config.row_tiles if tiles < 16 else 1  # 16 tiles of sums fill the registers
    device = x.get_device()
    is_bf16 = x.dtype == torch.bfloat16
    shared_kib = config.shared_kib or (EXCLUSIVE_KIB if config.early else SHARED_KIB)
    kernel = _stream_kernel(tiles, row_tiles, weight.groups_per_unit, is_bf16, shared_kib, device)
    workspace = workspace_of(x.device)
    problem = _Problem(
        (ctypes.c_byte * 128).from_buffer_copy(
            describe_matrix(x.data_ptr(), x.shape[0], weight.in_features, str(x.dtype), 8 * tiles)
        ),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        workspace.partials.data_ptr(),
        workspace.counters.data_ptr(),
        x.shape[0],
        weight.out_features,
        weight.in_features,
        units,
        blocks,
    )
    row_blocks = -(-blocks // row_tiles)
    grid = min(num_multiprocessors(device) * config.blocks_per_sm, row_blocks * units)
    kernel.launch(
        (grid, 1), STREAM_THREADS, [problem], torch.cuda.current_stream(device).cuda_stream, early=config.early
    )


def stage_bytes(tiles: int, row_tiles: int, groups: int) -> int:
    """Bytes of one stage of the ring: codes, activations, scales (``STAGE_BYTES`` of ``int4.cu``)."""
    used = row_tiles * 8 * 1024 + tiles * 8 * 256 + row_tiles * groups * 512
    return -(-used // 1024) * 1024


@functools.cache
def _stream_kernel(tiles: int, row_tiles: int, groups: int, is_bf16: bool, shared_kib: int, device: int) -> Kernel:
    per_stage = stage_bytes(tiles, row_tiles, groups)
    stages = min(MAX_STAGES, (1024 * shared_kib - CONTROL_BYTES) // per_stage)
    shared = max(stages * per_stage + CONTROL_BYTES, 1024 * shared_kib if shared_kib > SHARED_KIB else 0)
    # Eight tiles of sums need more registers than two resident blocks leave.
    resident = 1 if tiles * row_tiles >= 8 else 2
    return _load("int4_linear", tiles, row_tiles, stages, groups, is_bf16, resident, shared, device)


def _load(
    name: str,
    tiles: int,
    row_tiles: int,
    stages: int,
    groups: int,
    is_bf16: bool,
    resident: int,
    shared: int,
    device: int,
) -> Kernel:
    defines = {
        "NT": tiles,
        "RT": row_tiles,
        "STAGES": stages,
        "GROUPS": groups,
        "IS_BF16": int(is_bf16),
        "MIN_BLOCKS": resident,
    }
    return load_kernel(SOURCE, name, tuple(defines.items()), shared, device)


def _unordered(weight: Int4Weight) -> Int4Weight:
    """The weight for inputs that are in the layout's order already."""
    return Int4Weight(weight.codes, weight.scales, weight.out_features, weight.in_features)


@functools.cache
def _has_programs(device: int) -> bool:
    """``int4.cu`` is written in instructions that Hopper alone has; elsewhere torch multiplies, slowly."""
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Many rows


def dequantized_linear(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, at_once: int = DEQUANTIZED_BYTES
) -> Tensor:
    """The product through weights in ``x``'s dtype, ``at_once`` bytes of them a time; ``x`` in the layout's order."""
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.in_features % 8:
        return torch.nn.functional.linear(x, _unordered(weight).dequantize(x.dtype), bias)
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    blocks = int(weight.codes.shape[0])
    step = max(1, at_once // (2 * ROWS * weight.in_features))
    halves = torch.empty(min(step, blocks) * ROWS, weight.in_features, dtype=x.dtype, device=x.device)
    for first in range(0, blocks, step):
        rows = slice(first * ROWS, min((first + step) * ROWS, weight.out_features))
        part = halves[: rows.stop - rows.start]
        write_dequantized(weight, part, first, min(step, blocks - first))
        torch.mm(x, part.t(), out=out[:, rows])
    return out if bias is None else out.add_(bias)


def write_dequantized(weight: Int4Weight, out: Tensor, first: int, count: int) -> None:
    """Write ``count`` blocks of 128 rows, from block ``first`` on, into ``out`` (rows, K) in the layout's order."""
    device = out.get_device()
    is_bf16 = out.dtype == torch.bfloat16
    kernel = _load("int4_dequantize", 1, 1, 2, weight.groups_per_unit, is_bf16, 1, 0, device)
    arguments: list[ctypes.c_void_p | ctypes.c_int] = [
        ctypes.c_void_p(weight.codes.data_ptr()),
        ctypes.c_void_p(weight.scales.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int(weight.out_features),
        ctypes.c_int(weight.in_features),
        ctypes.c_int(weight.codes.shape[1]),
        ctypes.c_int(first),
    ]
    kernel.launch(
        (int(weight.codes.shape[1]), count),
        THREADS,
        arguments,
        torch.cuda.current_stream(device).cuda_stream,
        early=True,
    )
