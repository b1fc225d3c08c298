"""Computes attention over the paged cache in plain torch, the same on CPU and CUDA.

A step's sequences are sorted into groups of one query length and similar context; a group gathers its blocks, pads to
the longest and runs one scaled-dot-product attention. What depends only on the batch (gather indices, masks) is planned
once a step and used by every layer.

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

# A group is split when that spares this much padding per layer: about what one more launch costs a CPU core (20 us).
SPLIT_BYTES = 1 << 18


@dataclass(slots=True)
class AttentionGroup:
    """Holds the sequences of one query length.

    Attributes
    ----------
    rows : int64 (n * query_len,) flat rows, None when they are the whole batch in order
    size, query_len : n, query tokens each
    num_keys : keys each, after padding when lengths differ
    blocks : int64 (n * blocks each,)
    masks : window → additive (n or 1, 1, query_len, num_keys), 0 where a query may look and -inf elsewhere; None:
        everywhere
    is_causal : one sequence from its first token on, where the kernel's own causal form serves windowless layers
    """

    rows: Tensor | None
    size: int
    query_len: int
    num_keys: int
    blocks: Tensor
    masks: dict[int | None, Tensor | None]
    is_causal: bool


def plan_attention(
    batch: Batch, block_size: int, windows: frozenset[int | None], dtype: torch.dtype, token_bytes: int
) -> list[AttentionGroup]:
    """Sort a batch's sequences into groups, with their gather indices and masks.

    Parameters
    ----------
    windows : the windows that the model's layers use
    dtype : of masks, which is that of queries
    token_bytes : keys and values of one token in one layer
    """
    by_length: dict[int, list[int]] = {}
    singles: list[list[int]] = []
    starts: list[int] = []
    start = 0
    for index, query_len in enumerate(batch.query_lens):
        starts.append(start)
        start += query_len
        if query_len >= LONG_QUERY:
            singles.append([index])
        else:
            by_length.setdefault(query_len, []).append(index)
    lengths = batch.context_lens_host
    groups = [part for group in by_length.values() for part in _split(group, lengths, token_bytes)] + singles
    whole = len(groups) == 1
    return [_plan_group(batch, members, None if whole else starts, block_size, windows, dtype) for members in groups]


def _split(members: list[int], lengths: list[int], token_bytes: int) -> list[list[int]]:
    """Part sequences of unlike length while the padding saved is worth a launch."""
    if len(members) == 1 or len(members) * max(lengths[i] for i in members) * token_bytes <= SPLIT_BYTES:
        return [members]
    ordered = sorted(members, key=lengths.__getitem__)
    longest = lengths[ordered[-1]]
    saved, cut = max((n * (longest - lengths[ordered[n - 1]]), n) for n in range(1, len(ordered)))
    if saved * token_bytes <= SPLIT_BYTES:
        return [members]
    return _split(ordered[:cut], lengths, token_bytes) + _split(ordered[cut:], lengths, token_bytes)


def _plan_group(
    batch: Batch,
    members: list[int],
    starts: list[int] | None,
    block_size: int,
    windows: frozenset[int | None],
    dtype: torch.dtype,
) -> AttentionGroup:
    device = batch.token_ids.device
    query_len = batch.query_lens[members[0]]
    lengths = [batch.context_lens_host[i] for i in members]
    num_keys = max(lengths)
    num_blocks = -(-num_keys // block_size)
    table: list[int] = []
    for i, length in zip(members, lengths, strict=True):
        used = -(-length // block_size)
        own = batch.block_tables_host[i]
        # A short row is padded with its own last block, so nothing foreign is ever read into its softmax.
        table += own[:used] + [own[used - 1]] * (num_blocks - used)
    rows = None
    if starts is not None:
        flat = [row for i in members for row in range(starts[i], starts[i] + query_len)]
        rows = torch.tensor(flat, dtype=torch.int64, device=device)
    is_causal = lengths == [query_len]
    masks = {window: _mask(lengths, query_len, window, is_causal, device, dtype) for window in windows}
    blocks = torch.tensor(table, dtype=torch.int64, device=device)
    return AttentionGroup(rows, len(members), query_len, num_keys, blocks, masks, is_causal)


def _mask(
    lengths: list[int], query_len: int, window: int | None, is_causal: bool, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    shortest, longest = min(lengths), max(lengths)
    reaches_all = window is None or longest <= window
    if reaches_all and (is_causal or (query_len == 1 and shortest == longest)):
        return None
    key = torch.arange(longest, device=device)
    ends = torch.tensor(lengths if shortest != longest else [longest], device=device)[:, None, None, None]
    query = ends - query_len if query_len == 1 else ends + torch.arange(-query_len, 0, device=device)[:, None]
    hidden = key > query  # (n or 1, 1, query_len, num_keys)
    if window is not None and not reaches_all:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def attend(query: Tensor, layer: Tensor, groups: list[AttentionGroup], window: int | None, scale: float) -> Tensor:
    """Compute attention of every row over its own sequence's cached keys.

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
    num_kv_heads, size, query_len = layer.shape[3], group.size, group.query_len
    gathered = layer.index_select(0, group.blocks).view(size, -1, 2, num_kv_heads, head_dim)[:, : group.num_keys]
    keys, values = gathered.permute(2, 0, 3, 1, 4).unbind(0)  # (n, kv_heads, num_keys, head_dim)
    mask = group.masks[window]
    if query_len == 1:
        # The query heads that share a KV head are laid out as if they were query rows: no key is copied.
        folded = query.view(size, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(size, num_heads * head_dim)
    heads_first = query.view(size, query_len, num_heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        heads_first,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2).reshape(size * query_len, num_heads * head_dim)
