"""Launches ``attention_one.cu``: attention of one query a sequence, with the turn and the KV write before it."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cuda_attention import LOG2E, NO_WINDOW, suits
from engine.kernels.cuda_int4_many import num_multiprocessors
from engine.kernels.nvrtc import Kernel, load_kernel
from engine.kernels.paged_step import NO_NORMS, HeadNorms, PagedStep
from engine.kernels.workspace import workspace_of

SOURCE = "attention_one.cu"
MOST_HEADS = 8  # of one KV head
MOST_SPLITS = 32
PER_SM = 2  # thread blocks of 8 warps that run at once


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """Sets how a launch is cut.

    Parameters
    ----------
    warps : of a thread block, 4 or 8; three of 4 or two of 8 fit a multiprocessor
    least : tiles of 16 keys that are worth a thread block
    per_sm : thread blocks wanted per multiprocessor, of contexts that are long enough
    """

    warps: int = 8
    least: int = 16
    per_sm: int = PER_SM


class _DecodeArguments(ctypes.Structure):
    # As in attention_one.cu.
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "slots", "q_norm", "k_norm", "cache")),
        *((name, ctypes.c_void_p) for name in ("tables", "lengths", "starts", "out", "parts", "arrived")),
        ("block_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("token_stride", "q_stride", "k_stride", "v_stride", "table_stride")),
        *((name, ctypes.c_int) for name in ("kv_heads", "splits", "window")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


def takes(q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, norms: HeadNorms, num_sequences: int) -> bool:
    """Tell whether the program can be given these: those of :func:`engine.kernels.cuda_attention.suits`, whole heads.

    More thread blocks than run at once it is not given, either: what it spares is the wait before their first keys.
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    return (
        suits(q, kv_cache, MOST_HEADS)
        and all(heads.stride(2) == 1 and heads.stride(0) % 2 == heads.data_ptr() % 4 == 0 for heads in (q, k, v))
        and all(heads.shape[1] == 1 or heads.stride(1) == head_dim for heads in (q, k, v))
        and (norms.query is None) == (norms.key is None)
        and num_sequences * num_kv_heads <= PER_SM * num_multiprocessors(q.get_device())
    )


def attend_one_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    step: PagedStep,
    scale: float,
    window: int | None,
    norms: HeadNorms = NO_NORMS,
    cut: DecodeCut | None = None,
) -> Tensor:
    """Launch :func:`engine.kernels.paged_attention.turn_and_attend` of at most one query a sequence."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    num_sequences, device = step.context_lens.shape[0], q.get_device()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    workspace = workspace_of(q.device)
    pairs = num_sequences * num_kv_heads
    cut = cut or choose_cut(pairs, num_multiprocessors(device))
    splits = num_splits(cut, pairs, num_multiprocessors(device))
    problem = _DecodeArguments(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        step.slots.data_ptr(),
        None if norms.query is None else norms.query.data_ptr(),
        None if norms.key is None else norms.key.data_ptr(),
        kv_cache.data_ptr(),
        step.block_tables.data_ptr(),
        step.context_lens.data_ptr(),
        step.query_starts.data_ptr(),
        out.data_ptr(),
        workspace.partials.data_ptr(),
        workspace.counters.data_ptr(),
        kv_cache.stride(0),
        kv_cache.stride(1),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        step.block_tables.stride(0),
        num_kv_heads,
        splits,
        NO_WINDOW if window is None else window,
        scale * LOG2E,
        norms.eps,
    )
    is_bf16, has_norms = q.dtype == torch.bfloat16, norms.query is not None
    kernel = _kernel(head_dim, num_heads // num_kv_heads, block_size, is_bf16, has_norms, cut.warps, cut.least, device)
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch((num_kv_heads * splits, num_sequences), 32 * cut.warps, [problem], stream, early=True)
    return out


def choose_cut(pairs: int, num_sms: int) -> DecodeCut:
    """Return the cut for so many pairs of sequence and KV head: small parts where multiprocessors are idle anyhow."""
    return DecodeCut(warps=4, least=4) if 4 * pairs <= num_sms else DecodeCut()


def num_splits(cut: DecodeCut, pairs: int, num_sms: int) -> int:
    """Return the most thread blocks that share a pair's keys."""
    return min(MOST_SPLITS, -(-cut.per_sm * num_sms // pairs))


def part_bytes(head_dim: int, group: int) -> int:
    """Return the bytes that a thread block puts aside: sums of ``group`` heads, four floats of peaks and totals."""
    return 16 * (group * head_dim // 4 + group)


@functools.cache
def _kernel(
    head_dim: int, group: int, block_size: int, is_bf16: bool, has_norms: bool, warps: int, least: int, device: int
) -> Kernel:
    defines = {
        "DIM": head_dim,
        "GROUP": group,
        "BLOCK": block_size,
        "IS_BF16": int(is_bf16),
        "HAS_NORMS": int(has_norms),
        "WARPS": warps,
        "LEAST": least,
    }
    return load_kernel(SOURCE, "paged_attend_one", tuple(defines.items()), 0, device)
