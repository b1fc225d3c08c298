"""Computes attention of a mixed batch over the paged cache: prefill chunks, decodes and draft checks in one call.

:func:`turn_and_attend` is what a decoder layer does between its first two matrices: where every query is one token, a
GPU does it in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.dispatch import runs_on_gpu
from engine.kernels.fused import rope_and_write_kv
from engine.kernels.paged_step import NO_NORMS, HeadNorms, PagedStep


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    step: PagedStep,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of every query row over its own sequence's keys.

    Nothing is read back to the host and the launch does not depend on the lengths, so a captured graph stays valid for
    other lengths up to the same ``max_query_len`` and the table's width.

    Parameters
    ----------
    q : (T, Hq, D), turned by RoPE; heads one after the other, rows may be strided
    kv_cache : (num_blocks, block_size, 2, Hkv, D), this step's keys and values already in; a block may be strided.
        Behind a context, its last block must hold finite numbers
    step : where the rows and their keys lie; the output of a padding sequence is 0
    scale : of the scores
    window : a query sees this many keys, itself included; None: all before it
    out : (T, Hq, D) to write into, contiguous

    Returns
    -------
    (T, Hq, D)
    """
    if runs_on_gpu(q):
        from engine.kernels.cuda_attention import paged_attention_cuda, takes
        from engine.kernels.triton_attention import SHORT_QUERY, paged_attention_triton

        if step.max_query_len > SHORT_QUERY and takes(q, kv_cache):
            return paged_attention_cuda(q, kv_cache, step, scale, window, out)
        return paged_attention_triton(q, kv_cache, step, scale, window, out)
    result = paged_attention_reference(q, kv_cache, step, scale=scale, window=window)
    return result if out is None else out.copy_(result)


def paged_attention_reference(
    q: Tensor, kv_cache: Tensor, step: PagedStep, *, scale: float, window: int | None = None
) -> Tensor:
    """Compute :func:`paged_attention` in plain torch, sequence by sequence, scores and softmax in float32 or better."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    block_size = kv_cache.shape[1]
    group = q.shape[1] // kv_cache.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    starts = step.query_starts.tolist()
    for index, length in enumerate(step.context_lens.tolist()):
        first, last = starts[index], starts[index + 1]
        if length == 0 or first == last:
            continue
        blocks = step.block_tables[index, : -(-length // block_size)].long()
        keys, values = kv_cache.index_select(0, blocks).flatten(0, 1)[:length].to(wide).unbind(1)  # (length, Hkv, D)
        queries = q[first:last].to(wide)
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, dim=1)) * scale
        at = torch.arange(length - (last - first), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
        hidden = key > at
        if window is not None:
            hidden |= key <= at - window
        probs = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probs, values.repeat_interleave(group, dim=1)).to(q.dtype)
    return out


def turn_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    step: PagedStep,
    *,
    scale: float,
    window: int | None,
    norms: HeadNorms = NO_NORMS,
) -> Tensor:
    """Do :func:`engine.kernels.fused.rope_and_write_kv` and then :func:`paged_attention`, whose arguments these are.

    All but ``q``, ``k``, ``v`` must have been written before the step's last ordinary kernel (one that does not start
    early) began, earlier steps' keys and values too. A sequence with a context has a slot for its last token.

    Returns
    -------
    (T, Hq, D); ``q`` may be overwritten
    """
    if step.max_query_len == 1 and runs_on_gpu(q):
        from engine.kernels.cuda_attention_one import attend_one_cuda, takes

        if takes(q, k, v, kv_cache, norms, step.context_lens.shape[0]):
            return attend_one_cuda(q, k, v, cos, sin, kv_cache, step, scale, window, norms)
    q = rope_and_write_kv(q, k, v, cos, sin, None, step.slots, kv_cache, norms)
    return paged_attention(q, kv_cache, step, scale=scale, window=window)
