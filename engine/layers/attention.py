"""Attention over the paged cache in plain torch, the same on CPU and CUDA.

A step's sequences are sorted into groups that share a query length; a group gathers its blocks, pads to the longest
and runs one scaled-dot-product attention. What depends only on the batch (gather indices, masks) is planned once a
step and used by every layer.

Padding is masked and its softmax weight is exactly 0, so neighbours change a row only through the order of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import Batch

# Queries at least this long are attended alone: their own work outweighs a launch, padding would not be free.
LONG_QUERY = 32


@dataclass(slots=True)
class AttentionGroup:
    """Sequences of one query length.

    Attributes
    ----------
    rows : int64 (n * query_len,) flat rows, None when they are the whole batch in order
    size, query_len, padded_len : n, query tokens each, keys each after padding
    blocks : int64 (n * padded_len / block_size,)
    masks : window → bool (n or 1, 1, query_len, padded_len), True where a query may look; None: everywhere
    """

    rows: Tensor | None
    size: int
    query_len: int
    padded_len: int
    blocks: Tensor
    masks: dict[int | None, Tensor | None]


def plan_attention(batch: Batch, block_size: int, windows: frozenset[int | None]) -> list[AttentionGroup]:
    """Sort a batch's sequences into groups, with their gather indices and masks."""
    by_length: dict[int, list[int]] = {}
    singles: list[list[int]] = []
    for index, query_len in enumerate(batch.query_lens):
        if query_len >= LONG_QUERY:
            singles.append([index])
        else:
            by_length.setdefault(query_len, []).append(index)
    starts = [0]
    for query_len in batch.query_lens:
        starts.append(starts[-1] + query_len)
    groups = list(by_length.values()) + singles
    return [_plan_group(batch, members, starts, block_size, windows, whole=len(groups) == 1) for members in groups]


def _plan_group(
    batch: Batch, members: list[int], starts: list[int], block_size: int, windows: frozenset[int | None], *, whole: bool
) -> AttentionGroup:
    device = batch.token_ids.device
    query_len = batch.query_lens[members[0]]
    lengths = [batch.context_lens_host[i] for i in members]
    num_blocks = -(-max(lengths) // block_size)
    table: list[int] = []
    for i, length in zip(members, lengths, strict=True):
        own = batch.block_tables_host[i][: -(-length // block_size)]
        # A short row is padded with its own last block, so nothing foreign is ever read into its softmax.
        table += own + [own[-1]] * (num_blocks - len(own))
    rows = None
    if not whole:
        flat = [row for i in members for row in range(starts[i], starts[i + 1])]
        rows = torch.tensor(flat, dtype=torch.int64, device=device)
    padded_len = num_blocks * block_size
    masks = {window: _mask(lengths, query_len, padded_len, window, device) for window in windows}
    blocks = torch.tensor(table, dtype=torch.int64, device=device)
    return AttentionGroup(rows, len(members), query_len, padded_len, blocks, masks)


def _mask(
    lengths: list[int], query_len: int, padded_len: int, window: int | None, device: torch.device
) -> Tensor | None:
    if query_len == 1 and all(n == padded_len and (window is None or n <= window) for n in lengths):
        return None
    ends = torch.tensor(lengths, device=device)[:, None, None, None]  # (n, 1, 1, 1)
    query = ends - query_len + torch.arange(query_len, device=device)[None, None, :, None]
    key = torch.arange(padded_len, device=device)[None, None, None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend(query: Tensor, layer: Tensor, groups: list[AttentionGroup], window: int | None, scale: float) -> Tensor:
    """Attention of every row over its own sequence's cached keys.

    Parameters
    ----------
    query : (T, num_heads, head_dim), turned by RoPE
    layer : (num_blocks, block_size, 2, num_kv_heads, head_dim), this step's keys and values already written

    Returns
    -------
    (T, num_heads * head_dim)
    """
    if len(groups) == 1:
        return _attend_group(query, layer, groups[0], window, scale)
    out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
    for group in groups:
        assert group.rows is not None
        part = _attend_group(query.index_select(0, group.rows), layer, group, window, scale)
        out.index_copy_(0, group.rows, part)
    return out


def _attend_group(query: Tensor, layer: Tensor, group: AttentionGroup, window: int | None, scale: float) -> Tensor:
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads = layer.shape[3]
    gathered = layer.index_select(0, group.blocks).view(group.size, group.padded_len, 2, num_kv_heads, head_dim)
    keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # (n, kv_heads, padded_len, head_dim)
    mask = group.masks[window]
    if group.query_len == 1:
        # The query heads that share a KV head are laid out as if they were query rows: no key is copied.
        folded = query.view(group.size, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(group.size, num_heads * head_dim)
    heads_first = query.view(group.size, group.query_len, num_heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        heads_first, keys, values, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads
    )
    return out.transpose(1, 2).reshape(group.size * group.query_len, num_heads * head_dim)
