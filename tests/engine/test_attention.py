"""Paged attention against the definition, written as loops over float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch
from engine.layers import attention
from engine.layers.attention import attend, plan_attention

HEAD_DIM = 8


def naive(query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, scale: float) -> Tensor:
    """One query row (heads, d) at ``position`` over its sequence's keys and values (n, kv_heads, d)."""
    first = 0 if window is None else max(0, position + 1 - window)
    group = query.shape[0] // keys.shape[1]
    rows = []
    for head in range(query.shape[0]):
        own_keys = keys[first : position + 1, head // group].double()
        own_values = values[first : position + 1, head // group].double()
        weights = torch.softmax(own_keys @ query[head].double() * scale, dim=0)
        rows.append(weights @ own_values)
    return torch.cat(rows)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 1, 1, 3, 40])), min_size=1, max_size=7),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 5, 1000]),
    block_size=st.sampled_from([1, 4, 16]),
    split_bytes=st.sampled_from([0, 4096, 1 << 40]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    block_size: int,
    split_bytes: int,
    seed: int,
) -> None:
    """Ragged contexts and queries, shared KV heads, scattered blocks with other owners' leftovers, any grouping."""
    num_heads, num_kv_heads = heads
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    contexts = [max(context, query) for context, query in lengths]
    counts = [-(-context // block_size) for context in contexts]
    ids = rng.sample(range(sum(counts) + 3), sum(counts))
    layer = torch.randn(sum(counts) + 3, block_size, 2, num_kv_heads, HEAD_DIM, generator=generator) * 30
    flat = layer.view(-1, 2, num_kv_heads, HEAD_DIM)
    tables, stored = [], []
    for context, count in zip(contexts, counts, strict=True):
        table = [ids.pop() for _ in range(count)]
        slots = [table[p // block_size] * block_size + p % block_size for p in range(context)]
        flat[slots] = torch.randn(context, 2, num_kv_heads, HEAD_DIM, generator=generator)
        tables.append(table)
        stored.append(flat[slots])
    batch = Batch.build([[0] * query for _, query in lengths], contexts, tables, block_size=block_size)
    query = torch.randn(batch.num_tokens, num_heads, HEAD_DIM, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_BYTES", split_bytes)
        token_bytes = 2 * num_kv_heads * HEAD_DIM * 4
        groups = plan_attention(batch, block_size, frozenset([window]), torch.float32, token_bytes)
    out = attend(query, layer, groups, window, 0.3)
    row = 0
    for (_, num_query), context, own in zip(lengths, contexts, stored, strict=True):
        for position in range(context - num_query, context):
            expected = naive(query[row], own[:, 0], own[:, 1], position, window, 0.3)
            assert torch.allclose(out[row].double(), expected, atol=1e-5)
            row += 1


@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40), token_bytes=st.sampled_from([64, 1024, 65536]))
def test_grouping_loses_nobody(lengths: list[int], token_bytes: int) -> None:
    batch = Batch.build([[0]] * len(lengths), lengths, [list(range(32))] * len(lengths), block_size=16)
    groups = plan_attention(batch, 16, frozenset([None]), torch.float32, token_bytes)
    if len(groups) == 1:
        assert groups[0].rows is None
        return
    rows = [row for group in groups for row in (group.rows.tolist() if group.rows is not None else [])]
    assert sorted(rows) == list(range(len(lengths)))
    for group in groups:
        assert group.rows is not None
        assert group.num_keys == max(lengths[row] for row in group.rows.tolist())


def test_equal_lengths_need_no_mask() -> None:
    batch = Batch.build([[0], [0]], [33, 33], [[0, 1, 2], [3, 4, 5]], block_size=16)
    (group,) = plan_attention(batch, 16, frozenset([None, 40, 8]), torch.float32, 64)
    assert group.masks[None] is None
    assert group.masks[40] is None
    masked = group.masks[8]
    assert masked is not None
    assert int((masked == 0).sum()) == 8
