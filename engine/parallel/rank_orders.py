"""Encodes what rank 0 tells the others, as flat int64: a header of fixed length, then what it announces.

::

    header   code, then up to nine numbers
    MAKE_KV  pool, num_blocks, block_size
    DROP_KV  pool
    CLEAR    pool, n                          + n block ids
    FORWARD  pool, T, B, width, R             + token_ids, positions, slots (T each), query_lens, context_lens (B each),
                                                 tables (B * width), rows (R)
    LOGITS   R                                + on the data link, hidden states (R, H)
    PREPARE  pool, num_bytes, rows, columns     for steps: room for their input and for block tables
    STEP     pool, T, S, R, max_query_len, by_rows, graph, rows, columns
                                              + on the data link, block tables (rows, columns) that changed, then the
                                                input (see engine.device.step_buffers); graph 0 is none
    STOP
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from engine.batch import Batch
from engine.device.step_buffers import StepForm, StepShape

HEADER = 10


class RankOrder(IntEnum):
    """Names the first number of a header."""

    STOP = 0
    MAKE_KV = 1
    DROP_KV = 2
    CLEAR = 3
    FORWARD = 4
    LOGITS = 5
    PREPARE = 6
    STEP = 7


def header(order: RankOrder, *numbers: int) -> Tensor:
    """Return a header with its numbers, padded."""
    return torch.tensor([order, *numbers, *[0] * (HEADER - 1 - len(numbers))], dtype=torch.int64)


def step_header(pool: int, form: StepForm, graph: int, tables: Tensor) -> Tensor:
    """Announce a step of this form, and block tables of the shape of ``tables``."""
    shape = form.shape
    sizes = (shape.num_tokens, shape.num_sequences, shape.num_rows)
    return header(RankOrder.STEP, pool, *sizes, form.max_query_len, int(form.by_rows), graph, *tables.shape)


def form_of(head: list[int]) -> StepForm:
    """Return the form of the step that a header announces."""
    return StepForm(StepShape(*head[2:5]), head[5], bool(head[6]))


def batch_header(pool: int, batch: Batch) -> Tensor:
    """Announce :func:`pack`."""
    num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
    width, num_rows = batch.block_tables.shape[1], batch.logits_rows.shape[0]
    return header(RankOrder.FORWARD, pool, num_tokens, num_sequences, width, num_rows)


def pack(batch: Batch) -> Tensor:
    """Return a batch as one int64 tensor on the host."""
    lens = torch.tensor([*batch.query_lens, *batch.context_lens_host], dtype=torch.int64)
    parts = (batch.token_ids, batch.positions, batch.slot_mapping)
    tables = batch.block_tables.to("cpu", torch.int64).flatten()
    return torch.cat([*(part.cpu() for part in parts), lens, tables, batch.logits_rows.cpu()])


def packed_length(head: list[int]) -> int:
    """Count the numbers that follow a FORWARD header."""
    _, _, num_tokens, num_sequences, width, num_rows = head[:6]
    return 3 * num_tokens + 2 * num_sequences + num_sequences * width + num_rows


def unpack(head: list[int], body: Tensor, device: torch.device) -> Batch:
    """Undo :func:`pack`. Host tables come back padded, which nobody can tell from unpadded ones."""
    _, _, num_tokens, num_sequences, width, num_rows = head[:6]
    sizes = [num_tokens] * 3 + [num_sequences] * 2 + [num_sequences * width, num_rows]
    tokens, positions, slots, query, context, tables, rows = torch.split(body, sizes)
    query_lens = query.tolist()
    starts = torch.zeros(num_sequences + 1, dtype=torch.int32)
    starts[1:] = query.cumsum(0)
    grid = tables.view(num_sequences, width)
    return Batch(
        token_ids=tokens.to(device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_start=starts.to(device),
        context_lens=context.to(device, torch.int32),
        block_tables=grid.to(device, torch.int32),
        query_lens=query_lens,
        context_lens_host=context.tolist(),
        block_tables_host=grid.tolist(),
        logits_rows=rows.to(device),
    )
