"""Holds the Triton programs of :mod:`engine.kernels.paged_attention`.

A program takes a few query tokens of one sequence with all query heads of one KV head, so that its matrix products have
at least 16 rows, and walks over the keys they see with an online softmax (Milakov & Gimelshein 2018; Dao 2023,
section 3). Short queries split the walk into a fixed number of parts: each takes an equal share of the keys there are,
the last ones often none, and a second launch weighs the parts by their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.paged_step import PagedStep
from engine.kernels.triton_launch import early_start

MAX_SPLITS = 32
SHORT_QUERY = 16  # tokens; up to here (decodes, speculation checks) keys are split and rows kept few
_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sets how a launch is cut.

    Parameters
    ----------
    rows : query rows (tokens times heads of a group) a program holds, a power of 2 from 16 on
    tile : keys looked at in one go
    splits : parts of the key walk
    """

    rows: int
    tile: int
    splits: int
    num_warps: int
    num_stages: int


def choose_config(max_query_len: int, group: int, programs_wide: int, num_sms: int) -> AttentionConfig:
    """Return the cut for a batch; ``programs_wide`` is sequences times KV heads."""
    if max_query_len > SHORT_QUERY:
        return AttentionConfig(max(64, triton.next_power_of_2(group)), 64, 1, 4, 2)
    rows = max(16, triton.next_power_of_2(group * max_query_len))
    splits = 1
    if programs_wide < 4 * num_sms:
        splits = max(4, min(MAX_SPLITS, triton.next_power_of_2(4 * num_sms // programs_wide)))
    return AttentionConfig(min(rows, 64), 128 if rows == 16 else 64, splits, 4, 3)


def paged_attention_triton(
    q: Tensor,
    kv_cache: Tensor,
    step: PagedStep,
    scale: float,
    window: int | None,
    out: Tensor | None,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Launch :func:`engine.kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_sequences, num_kv_heads = step.context_lens.shape[0], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if config is None:
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        config = choose_config(step.max_query_len, group, num_sequences * num_kv_heads, num_sms)
    tokens = max(1, config.rows // group)
    # A sequence's first program is number query_starts[s] // tokens + s, so gaps stay below one per sequence.
    one_program_each = step.max_query_len <= tokens
    num_programs = num_sequences if one_program_each else num_tokens // tokens + num_sequences
    shape = (num_tokens, num_heads, config.splits)
    is_split = config.splits > 1
    parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device) if is_split else out
    sums = torch.empty(*shape, 2, dtype=torch.float32, device=q.device) if is_split else out
    padded_dim = triton.next_power_of_2(head_dim)
    _attend[(num_programs, num_kv_heads, config.splits)](
        q,
        kv_cache,
        step.block_tables,
        step.context_lens,
        step.query_starts,
        out,
        parts,
        sums,
        scale * _LOG2E,
        num_sequences,
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        step.block_tables.stride(0),
        0 if window is None else window,
        num_heads,
        HAS_WINDOW=window is not None,
        ONE_PROGRAM_EACH=one_program_each,
        GROUP=group,
        TOKENS=tokens,
        ROWS=config.rows,
        DIM=head_dim,
        DIM_PADDED=padded_dim,
        BLOCK_SIZE=kv_cache.shape[1],
        TILE=config.tile,
        SPLITS=config.splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early_start(q),
    )
    if is_split:
        _combine[(num_tokens, num_heads)](
            parts,
            sums,
            out,
            num_heads,
            DIM=head_dim,
            DIM_PADDED=padded_dim,
            SPLITS=config.splits,
            num_warps=1 if config.splits <= 8 else 4,
            **early_start(q),
        )
    return out


@triton.jit
def _sequence_of(
    program: tl.tensor, query_starts: tl.tensor, num_sequences: tl.tensor, TOKENS: tl.constexpr
) -> tl.tensor:
    """Return the last sequence whose first program is not after ``program``."""
    low, high = 0, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend(
    q: tl.tensor,
    kv_cache: tl.tensor,
    block_tables: tl.tensor,
    context_lens: tl.tensor,
    query_starts: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    num_sequences: tl.tensor,
    q_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    num_heads: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    ONE_PROGRAM_EACH: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    sequence = program
    first_token = 0
    if not ONE_PROGRAM_EACH:
        sequence = _sequence_of(program, query_starts, num_sequences, TOKENS)
        first_token = (program - tl.load(query_starts + sequence) // TOKENS - sequence) * TOKENS
    start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - start
    if first_token >= query_len:
        return
    length = tl.load(context_lens + sequence)

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < query_len)
    at = tl.arange(0, DIM_PADDED)
    in_dim = at < DIM
    position = length - query_len + token  # of each row's query
    flat_row = (start + token).to(tl.int64)
    query = tl.load(
        q + flat_row[:, None] * q_stride + head[:, None] * DIM + at[None, :],
        mask=is_row[:, None] & in_dim[None, :],
        other=0.0,
    )

    # Tiles [first_tile, last_tile) hold all keys that some row sees; this split takes [begin, end) of them.
    last_key = tl.minimum(length, length - query_len + first_token + TOKENS)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(length - query_len + first_token - window + 1, 0) // TILE
    last_tile = tl.cdiv(last_key, TILE)
    share = tl.cdiv(last_tile - first_tile, SPLITS)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, last_tile)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for tile in range(begin, end):
        key = tile * TILE + tl.arange(0, TILE)
        is_key = key < last_key
        block = tl.load(block_tables + sequence * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = block * block_stride + (key % BLOCK_SIZE) * token_stride + kv_head * DIM
        keys = tl.load(
            kv_cache + offset[None, :] + at[:, None], mask=is_key[None, :] & in_dim[:, None], other=0.0
        )  # (DIM, TILE)
        scores = tl.dot(query, keys, input_precision=PRECISION) * scale
        seen = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that sees nothing in its first tiles
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(peak - anchor)
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(
            kv_cache + offset[:, None] + value_stride + at[None, :], mask=is_key[:, None] & in_dim[None, :], other=0.0
        )  # (TILE, DIM)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = higher

    out_mask = is_row[:, None] & in_dim[None, :]
    flat_head = flat_row * num_heads + head
    if SPLITS == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + flat_head[:, None] * DIM + at[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
    else:
        place = flat_head * SPLITS + split
        if begin < end:
            tl.store(parts + place[:, None] * DIM + at[None, :], acc, mask=out_mask)
        tl.store(sums + place * 2, peak, mask=is_row)
        tl.store(sums + place * 2 + 1, total, mask=is_row)


@triton.jit
def _combine(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Weigh the splits of one row and head by their softmax sums."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    at = tl.arange(0, DIM_PADDED)
    in_dim = at < DIM
    peaks = tl.load(sums + (row * SPLITS + split) * 2)
    totals = tl.load(sums + (row * SPLITS + split) * 2 + 1)
    highest = tl.max(peaks, axis=0)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(peaks - anchor)
    used = totals > 0.0  # the others' parts were never written
    values = tl.load(
        parts + (row * SPLITS + split)[:, None] * DIM + at[None, :], mask=used[:, None] & in_dim[None, :], other=0.0
    )
    total = tl.sum(weights * totals, axis=0)
    mixed = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + at, mixed.to(out.dtype.element_ty), mask=in_dim)
