"""Launches ``attention_many.cu``: attention of prompts over the paged cache."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from engine.kernels.nvrtc import Kernel, describe_tensor, load_kernel
from engine.kernels.paged_step import PagedStep
from engine.kernels.workspace import workspace_of

SOURCE = "attention_many.cu"
THREADS = 3 * 128
ROWS = KEYS = 128
STAGES = 2
CONTROL_BYTES = 256
DIMS = (64, 128)
BLOCKS = (8, 16, 32, 64, 128)
MOST_HEADS = 64  # of one KV head
LOG2E = 1.4426950408889634
NO_WINDOW = (1 << 31) - 1


class _PromptArguments(ctypes.Structure):
    # As in attention_many.cu.
    _fields_ = (
        *((name, ctypes.c_byte * 128) for name in ("q", "kv")),
        *((name, ctypes.c_void_p) for name in ("out", "block_tables", "context_lens", "query_starts", "claims")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("S", "kv_heads", "num_blocks", "table_stride", "window", "programs")),
    )


def takes(q: Tensor, kv_cache: Tensor) -> bool:
    """Tell whether the program can be given these: those of :func:`suits`, queries at multiples of 16 bytes."""
    return suits(q, kv_cache, MOST_HEADS) and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0


def suits(q: Tensor, kv_cache: Tensor, most_heads: int) -> bool:
    """Tell whether our programs read a cache: halves, heads of 64 or 128, blocks that tile 128 keys, a Hopper.

    Parameters
    ----------
    most_heads : of one KV head
    """
    _, block_size, _, num_kv_heads, head_dim = kv_cache.shape
    strides = kv_cache.stride()
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.dtype == q.dtype
        and head_dim in DIMS
        and block_size in BLOCKS
        and q.shape[1] // num_kv_heads <= most_heads
        and strides[2:] == (num_kv_heads * head_dim, head_dim, 1)
        and all(stride % 8 == 0 for stride in strides[:2])
        and kv_cache.data_ptr() % 16 == 0
        and _is_hopper(q.get_device())
    )


def paged_attention_cuda(
    q: Tensor, kv_cache: Tensor, step: PagedStep, scale: float, window: int | None, out: Tensor | None = None
) -> Tensor:
    """Launch :func:`engine.kernels.paged_attention.paged_attention` of what :func:`takes` takes, of any lengths."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, _, num_kv_heads, _ = kv_cache.shape
    group, device = num_heads // num_kv_heads, q.get_device()
    tokens = ROWS // group
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A sequence's first program is number query_starts[s] // tokens + s, so gaps stay below one per sequence.
    programs = num_tokens // tokens + step.context_lens.shape[0]
    problem = _PromptArguments(
        _map(q, (head_dim, num_heads, num_tokens), (head_dim, q.stride(0)), (64, group, tokens)),
        _map(
            kv_cache,
            (head_dim, 2 * num_kv_heads, block_size, num_blocks),
            (head_dim, kv_cache.stride(1), kv_cache.stride(0)),
            (64, 1, block_size, 1),
        ),
        out.data_ptr(),
        step.block_tables.data_ptr(),
        step.context_lens.data_ptr(),
        step.query_starts.data_ptr(),
        workspace_of(q.device).counters.data_ptr(),
        scale * LOG2E,
        step.context_lens.shape[0],
        num_kv_heads,
        num_blocks,
        step.block_tables.stride(0),
        NO_WINDOW if window is None else window,
        programs,
    )
    kernel = _kernel(head_dim, group, block_size, q.dtype == torch.bfloat16, device)
    grid = min(torch.cuda.get_device_properties(device).multi_processor_count, programs * num_kv_heads)
    kernel.launch((grid, 1), THREADS, [problem], torch.cuda.current_stream(device).cuda_stream, early=True)
    return out


def shared_bytes(head_dim: int) -> int:
    """Return the bytes of the rings of keys and of values, two tiles of queries, and the ``Control``."""
    return (2 * STAGES + 2) * KEYS * 2 * head_dim + CONTROL_BYTES


@functools.cache
def _kernel(head_dim: int, group: int, block_size: int, is_bf16: bool, device: int) -> Kernel:
    defines = {"DIM": head_dim, "GROUP": group, "BLOCK": block_size, "IS_BF16": int(is_bf16)}
    return load_kernel(SOURCE, "attention_many", tuple(defines.items()), shared_bytes(head_dim), device)


def _map(
    tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_byte]:
    described = describe_tensor(tensor.data_ptr(), str(tensor.dtype), sizes, strides, box)
    return (ctypes.c_byte * 128).from_buffer_copy(described)


@functools.cache
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
