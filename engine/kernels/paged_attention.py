"""Attention of a mixed batch over the paged cache: prefill chunks, decodes and speculation checks in one call.

:func:`turn_and_attend` is what a decoder layer does between its first two matrices: where every query is one token, a
GPU does it in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.dispatch import runs_on_gpu
from engine.kernels.fused import rope_and_write_kv


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    max_query_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of every query row over its own sequence's keys.

    Nothing is read back to the host and the launch does not depend on the lengths, so a captured graph stays valid for
    other lengths up to the same ``max_query_len`` and the table's width.

    Parameters
    ----------
    q : (T, Hq, D), turned by RoPE; heads one after the other, rows may be strided
    kv_cache : (num_blocks, block_size, 2, Hkv, D), this step's keys and values already in; a block may be strided.
        Behind a context, its last block must hold finite numbers
    block_tables : int32 (S, max_blocks); entries past a sequence's context may hold anything
    context_lens : int32 (S,), keys present after this step; 0: a padding row, its output is 0
    query_starts : int32 (S + 1,); sequence s owns rows ``query_starts[s]:query_starts[s + 1]``, its last query sits at
        position ``context_lens[s] - 1``
    scale : of the scores
    window : a query sees this many keys, itself included; None: all before it
    max_query_len : the longest query, known on the host
    out : (T, Hq, D) to write into, contiguous

    Returns
    -------
    (T, Hq, D)
    """
    if runs_on_gpu(q):
        from engine.kernels.cuda_attention import paged_attention_cuda, takes
        from engine.kernels.triton_attention import SHORT_QUERY, paged_attention_triton

        if max_query_len > SHORT_QUERY and takes(q, kv_cache):
            return paged_attention_cuda(q, kv_cache, block_tables, context_lens, query_starts, scale, window, out)
        return paged_attention_triton(
            q, kv_cache, block_tables, context_lens, query_starts, scale, window, max_query_len, out
        )
    result = paged_attention_reference(
        q, kv_cache, block_tables, context_lens, query_starts, scale=scale, window=window
    )
    return result if out is None else out.copy_(result)


def paged_attention_reference(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """:func:`paged_attention` in plain torch, one sequence after the other, scores and softmax in float32 or better."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    block_size = kv_cache.shape[1]
    group = q.shape[1] // kv_cache.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    starts = query_starts.tolist()
    for index, length in enumerate(context_lens.tolist()):
        first, last = starts[index], starts[index + 1]
        if length == 0 or first == last:
            continue
        blocks = block_tables[index, : -(-length // block_size)].long()
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
    slots: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """:func:`engine.kernels.fused.rope_and_write_kv` and then :func:`paged_attention`, whose arguments these are.

    All but ``q``, ``k``, ``v`` must have been written before the step's last ordinary kernel (one that does not start
    early) began, earlier steps' keys and values too. A sequence with a context has a slot for its last token.

    Returns
    -------
    (T, Hq, D); ``q`` may be overwritten
    """
    if max_query_len == 1 and runs_on_gpu(q):
        from engine.kernels.cuda_attention_one import attend_one_cuda, takes

        if takes(q, k, v, kv_cache, q_norm, k_norm, context_lens.shape[0]):
            where = block_tables, context_lens, query_starts
            return attend_one_cuda(q, k, v, cos, sin, slots, kv_cache, *where, scale, window, q_norm, k_norm, eps)
    q = rope_and_write_kv(q, k, v, cos, sin, None, slots, kv_cache, q_norm, k_norm, eps)
    return paged_attention(
        q,
        kv_cache,
        block_tables,
        context_lens,
        query_starts,
        scale=scale,
        window=window,
        max_query_len=max_query_len,
    )
