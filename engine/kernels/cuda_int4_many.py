"""Cuts the work of ``int4_many.cu`` (4-bit weights times many rows) and launches it."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.int4 import ROWS, Int4Weight
from engine.kernels.nvrtc import Kernel, describe_matrix, load_kernel
from engine.kernels.workspace import count_runs, workspace_of

SOURCE = "int4_many.cu"
THREADS = 3 * 128
MAX_STAGES = 8
SHARED_BYTES = 227 << 10  # all that a thread block may have
BOX_ROWS = 32
BOX_BYTES = 128  # of a row: 64 outputs, half as many where they are gated
BOXES_BYTES = 4 * 128 * BOX_ROWS  # results on their way out
CONTROL_BYTES = 256  # at least a ``Control`` of that many stages


@dataclass(frozen=True, slots=True)
class TileCut:
    """Sets what a thread block holds at once, with what that takes on an H200.

    Parameters
    ----------
    tiles : of 8 activation rows
    blocks : of 128 weight rows
    unit_us : to multiply 128 inputs of a whole tile
    split_unit_us : of a tile that is split: its thread blocks read unlike inputs at a time
    join_us : to sum the parts of split tiles
    """

    tiles: int
    blocks: int
    unit_us: float
    split_unit_us: float
    join_us: float


# Fitted to 480 timings of matrices of 3B, 8B and 70B at 96 to 512 rows, whole and split: a plan chosen by them takes
# 1 % longer than the best on average, 12 % at worst.
CUTS = (
    TileCut(32, 1, 1.49, 1.81, 11.7),
    TileCut(24, 1, 1.07, 1.15, 11.8),
    TileCut(16, 2, 1.49, 1.68, 11.1),
    TileCut(12, 2, 1.33, 1.39, 9.7),
    TileCut(8, 2, 1.13, 1.1, 7.4),
    TileCut(16, 1, 0.87, 0.91, 7.1),
)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Cuts a product into ``tiles``, the first ``whole`` of which no two of ``grid`` thread blocks share."""

    cut: TileCut
    x_tiles: int
    tiles: int
    whole: int
    grid: int
    us: float


class TileArguments(ctypes.Structure):
    """Holds a launch's arguments, as in ``tiles.cuh``."""

    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("x", "y")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "bias", "parts")),
        *((name, ctypes.c_int) for name in ("N", "U", "B", "x_tiles", "tiles", "whole")),
        ("padding", ctypes.c_byte * 8),  # the tensor maps' alignment of 64
    )


def many_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, plan: TilePlan | None = None) -> Tensor:
    """Compute ``x @ W.T + bias`` with weights rounded to ``x``'s dtype, summed in float32; gated if the weight is.

    Parameters
    ----------
    x : (M, K) halves in the layout's input order; the address a multiple of 16, K and the outputs multiples of 8
    plan : of a cut in ``CUTS``; None takes that of :func:`choose_plan`
    """
    device = x.get_device()
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    blocks, units = weight.codes.shape[:2]
    plan = plan or choose_plan(x.shape[0], blocks, units, num_multiprocessors(device))
    kernel = _kernels(weight.groups_per_unit, x.dtype == torch.bfloat16, weight.is_gated, device)[plan.cut]
    problem = describe_problem(x, weight, bias, out, plan)
    kernel.launch((plan.grid, 1), THREADS, [problem], torch.cuda.current_stream(device).cuda_stream, early=True)
    return out


def describe_problem(x: Tensor, weight: Int4Weight, bias: Tensor | None, out: Tensor, plan: TilePlan) -> TileArguments:
    """Return the launch of ``plan``; ``x`` as the program wants it."""
    blocks, units = weight.codes.shape[:2]
    return TileArguments(
        _map(x, 8 * plan.cut.tiles),
        _map(out, BOX_ROWS, BOX_BYTES // 2 if weight.is_gated else BOX_BYTES),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        workspace_of(x.device).parts.data_ptr(),
        weight.num_rows,
        units,
        blocks,
        plan.x_tiles,
        plan.tiles,
        plan.whole,
    )


@functools.lru_cache(maxsize=4096)
def choose_plan(rows: int, blocks: int, units: int, multiprocessors: int, cuts: tuple[TileCut, ...] = CUTS) -> TilePlan:
    """Return the plan that should end soonest for ``rows`` activation rows and ``blocks`` x ``units`` of weights."""
    return min((plan_cut(each, rows, blocks, units, multiprocessors) for each in cuts), key=lambda plan: plan.us)


def plan_cut(cut: TileCut, rows: int, blocks: int, units: int, multiprocessors: int) -> TilePlan:
    """Split the last tiles where summing them costs less than thread blocks that idle."""
    whole, split = (plan_tiles(cut, rows, blocks, units, multiprocessors, splits=splits) for splits in (False, True))
    return whole if whole.us <= split.us else split


def plan_tiles(cut: TileCut, rows: int, blocks: int, units: int, multiprocessors: int, *, splits: bool) -> TilePlan:
    """Take all tiles whole, or split those of the last rounds if they leave thread blocks idle."""
    x_tiles = -(-rows // (8 * cut.tiles))
    tiles = x_tiles * -(-blocks // cut.blocks)
    grid = count_runs(tiles, units, multiprocessors)
    rounds, left = divmod(tiles, grid)
    if not splits or not left:
        us = (rounds + (left > 0)) * units * cut.unit_us
        return TilePlan(cut, x_tiles, tiles, tiles, min(multiprocessors, tiles), us)
    whole = max(0, rounds - 1) * grid
    us = whole // grid * units * cut.unit_us + (tiles - whole) * units / grid * cut.split_unit_us + cut.join_us
    return TilePlan(cut, x_tiles, tiles, whole, grid, us)


@functools.cache
def _kernels(groups: int, is_bf16: bool, is_gated: bool, device: int) -> dict[TileCut, Kernel]:
    """Return the programs for all ``CUTS``, compiled at once: row counts come unforeseen, in the midst of serving."""
    kernels: dict[TileCut, Kernel] = {}
    for cut in CUTS:
        stages, shared = shared_bytes(cut, groups)
        defines = describe_tile(cut, stages, is_bf16, is_gated) | {"GROUPS": groups}
        kernels[cut] = load_kernel(SOURCE, "int4_many", tuple(defines.items()), shared, device)
    return kernels


def describe_tile(cut: TileCut, stages: int, is_bf16: bool, is_gated: bool) -> dict[str, int]:
    """Return the defines that ``tiles.cuh`` is compiled with."""
    return {
        "NT": cut.tiles,
        "RT": cut.blocks,
        "STAGES": stages,
        "IS_BF16": int(is_bf16),
        "IS_GATED": int(is_gated),
    }


def shared_bytes(cut: TileCut, groups: int) -> tuple[int, int]:
    """Return stages of the ring and shared memory in all. A stage: codes, activations, scales (``STAGE_BYTES``)."""
    return fit_stages(cut.blocks * (64 * ROWS + 512 * groups) + 8 * cut.tiles * 256)


def fit_stages(stage_bytes: int) -> tuple[int, int]:
    """Return as many stages of so many bytes as a thread block can have, and its shared memory in all."""
    per_stage = -(-stage_bytes // 1024) * 1024
    stages = min(MAX_STAGES, (SHARED_BYTES - BOXES_BYTES - CONTROL_BYTES) // per_stage)
    return stages, stages * per_stage + BOXES_BYTES + CONTROL_BYTES


def _map(matrix: Tensor, box_rows: int, box_bytes: int = BOX_BYTES) -> ctypes.Array[ctypes.c_byte]:
    rows, columns = matrix.shape
    described = describe_matrix(matrix.data_ptr(), rows, columns, str(matrix.dtype), box_rows, box_bytes)
    return (ctypes.c_byte * 128).from_buffer_copy(described)


@functools.cache
def num_multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
