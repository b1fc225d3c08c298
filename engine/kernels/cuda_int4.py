"""Chooses the program that multiplies 4-bit weights, by the number of rows, and launches the one for few.

===========  ===================================================================================================
rows         program
===========  ===================================================================================================
up to 64     ``int4.cu``: exact but for one rounding; a row has the same bits among 1 to 64 rows
more         ``int4_many.cu``: weights are rounded to halves; a row has the same bits among 65 to 96, and 97 to 128
===========  ===================================================================================================

Widths that no 8 divides, float32, and GPUs before or after Hopper go through torch, slowly.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.cuda_int4_many import many_linear, num_multiprocessors
from engine.kernels.int4 import Int4Weight, gate_alternating
from engine.kernels.nvrtc import Kernel, describe_matrix, load_kernel
from engine.kernels.workspace import count_runs, workspace_of

SOURCE = "int4.cu"
FEW_ROWS = 64
GROUP_TILES = 3  # of 8 activation rows: from so many on warpgroups multiply, one thread block to a multiprocessor
MIN_STAGES = 4  # of the ring, whatever they take; 57 to 64 rows take 4 to 10 % longer with six
MAX_STAGES = 8
SHARED_KIB = 112  # two thread blocks fit a multiprocessor
EXCLUSIVE_KIB = 120  # one does
CONTROL_BYTES = 256  # at least a ``Control`` of that many stages


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Sets how the streaming kernel cuts a matrix; on an H200 the defaults were within 4 % of the best for all shapes.

    Parameters
    ----------
    row_tiles : tiles of 16 weight rows that a warp holds at once, 1 or 2; None takes 2 up to 16 rows and 1 beyond. More
        than 32 rows leave registers for one
    blocks_per_sm : thread blocks launched per multiprocessor; beyond 16 rows one
    shared_kib : shared memory of a thread block, or what ``MIN_STAGES`` take where that is more; None takes
        ``EXCLUSIVE_KIB`` for a kernel that starts early, so that a multiprocessor never holds two of its blocks while
        another holds none, and ``SHARED_KIB`` otherwise
    early : start before the kernel ahead has ended. A captured 70B layer at one row takes 151 us early, 161 late, and
        238 early where two blocks may share a multiprocessor; an 8B layer 65, 73 and 84.
    """

    row_tiles: int | None = None
    blocks_per_sm: int = 1
    shared_kib: int | None = None
    early: bool = True


class _StreamArguments(ctypes.Structure):
    # As in int4.cu; the tensor map's alignment of 64 rounds the size up to 192.
    _fields_ = (
        ("x", ctypes.c_byte * 128),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "bias", "y", "parts")),
        *((name, ctypes.c_int) for name in ("M", "N", "U", "B")),
        ("padding", ctypes.c_byte * 8),
    )


def int4_linear_cuda(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, config: StreamConfig | None = None
) -> Tensor:
    """Launch :func:`engine.kernels.int4.int4_linear` on a GPU."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    if x.shape[0] == 0:
        return x.new_empty(0, weight.out_features)
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    is_few = x.shape[0] <= FEW_ROWS
    if (
        not is_half
        or weight.in_features % 8
        or (not is_few and weight.out_features % 8)
        or not _has_programs(x.get_device())
    ):
        rows = torch.nn.functional.linear(x, replace(weight, order=None).dequantize(x.dtype), bias)
        return gate_alternating(rows.float()).to(x.dtype) if weight.is_gated else rows
    return stream_linear(x, weight, bias, config) if is_few else many_linear(x, weight, bias)


def stream_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None, config: StreamConfig | None = None) -> Tensor:
    """Launch ``int4.cu`` for up to ``FEW_ROWS`` halves ``x`` (M, K) in the layout's input order; K a multiple of 8."""
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    blocks, units = weight.codes.shape[:2]
    config = config or StreamConfig()
    tiles = -(-x.shape[0] // 8)
    by_groups = tiles >= GROUP_TILES
    device = x.get_device()
    row_tiles = 1 if tiles > 4 else config.row_tiles or (1 if by_groups else 2)
    shared_kib = config.shared_kib or (EXCLUSIVE_KIB if config.early else SHARED_KIB)
    is_bf16 = x.dtype == torch.bfloat16
    kernel = _stream_kernel(tiles, row_tiles, weight.groups_per_unit, is_bf16, weight.is_gated, shared_kib, device)
    problem = _StreamArguments(
        (ctypes.c_byte * 128).from_buffer_copy(
            describe_matrix(x.data_ptr(), x.shape[0], weight.in_features, str(x.dtype), 8 * tiles)
        ),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        workspace_of(x.device).parts.data_ptr(),
        x.shape[0],
        weight.num_rows,
        units,
        blocks,
    )
    row_blocks = -(-blocks // blocks_at_once(tiles, row_tiles))
    resident = num_multiprocessors(device) * (1 if by_groups else config.blocks_per_sm)
    grid = count_runs(row_blocks, units, resident)
    threads = 512 + 128 if by_groups else 256 + 32  # that multiply, and those of which one copies
    kernel.launch((grid, 1), threads, [problem], torch.cuda.current_stream(device).cuda_stream, early=config.early)
    return out


def blocks_at_once(tiles: int, row_tiles: int) -> int:
    """Return the blocks of 128 weight rows in a unit of work (``BLOCKS`` of ``int4.cu``)."""
    return row_tiles * (2 if tiles >= GROUP_TILES else 1)


def stage_bytes(tiles: int, row_tiles: int, groups: int) -> int:
    """Return the bytes of one stage of the ring: codes, activations, scales (``STAGE_BYTES`` of ``int4.cu``)."""
    used = blocks_at_once(tiles, row_tiles) * (8 * 1024 + groups * 512) + tiles * 8 * 256
    return -(-used // 1024) * 1024


def fit_stages(tiles: int, row_tiles: int, groups: int, shared_kib: int) -> tuple[int, int]:
    """Return stages of the ring and shared memory in all: from ``SHARED_KIB`` on, to keep other thread blocks away."""
    per_stage = stage_bytes(tiles, row_tiles, groups)
    stages = min(MAX_STAGES, max(MIN_STAGES, (1024 * shared_kib - CONTROL_BYTES) // per_stage))
    return stages, max(stages * per_stage + CONTROL_BYTES, 1024 * shared_kib if shared_kib > SHARED_KIB else 0)


@functools.cache
def _stream_kernel(
    tiles: int, row_tiles: int, groups: int, is_bf16: bool, is_gated: bool, shared_kib: int, device: int
) -> Kernel:
    stages, shared = fit_stages(tiles, row_tiles, groups, shared_kib)
    defines = {
        "NT": tiles,
        "RT": row_tiles,
        "STAGES": stages,
        "GROUPS": groups,
        "IS_BF16": int(is_bf16),
        "IS_GATED": int(is_gated),
    }
    return load_kernel(SOURCE, "int4_linear", tuple(defines.items()), shared, device)


@functools.cache
def _has_programs(device: int) -> bool:
    """Tell whether this GPU runs ``int4.cu``, whose instructions only Hopper has; elsewhere torch multiplies."""
    return torch.cuda.get_device_capability(device)[0] == 9
