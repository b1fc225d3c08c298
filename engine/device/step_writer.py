"""Writes a step's input on the host: tokens, positions, slots and sampling options, padded to its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.device.draw_kinds import put_padding, put_row
from engine.device.step_buffers import BlockTables, HostFields
from engine.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class ResidentState:
    """Holds what a step refers to that lies on the device already.

    Attributes
    ----------
    tables : brought up to date for the step's sequences
    row_of : id of a sequence → row of the last step's draws that holds its token
    block_size : tokens of a KV block
    """

    tables: BlockTables
    row_of: Mapping[int, int]
    block_size: int


def fill_decode(
    host: HostFields, items: list[ScheduledSequence], query_len: int, resident: ResidentState, *, has_options: bool
) -> None:
    """Write a step whose sequences all have one token and at most ``query_len - 1`` drafts.

    Parameters
    ----------
    has_options : some token is drawn by more than its logits
    """
    count, size = len(items), len(host.context_lens)
    starts = np.zeros(size, dtype=np.int64)
    tokens = np.zeros((size, query_len), dtype=np.int64)
    sources = np.full((size, query_len), -1, dtype=np.int64)
    used = np.zeros((size, query_len), dtype=bool)
    for row, item in enumerate(items):
        sequence = item.sequence
        starts[row] = item.start
        resident.tables.set(row, sequence.block_table)
        if item.start < len(sequence.token_ids):
            tokens[row, 0] = sequence.token_ids[item.start]
        else:
            sources[row, 0] = resident.row_of[id(sequence)]
        if item.num_drafts:
            tokens[row, 1 : item.num_drafts + 1] = sequence.draft_ids
        used[row, : item.num_drafts + 1] = True
        if has_options:
            for j in range(query_len):
                put_row(host, row * query_len + j, sequence, sequence.num_tokens + j)
    positions = starts[:, None] + np.arange(query_len)
    host.token_ids[:] = tokens.reshape(-1)
    host.source_rows[:] = sources.reshape(-1)
    slots = np.full((size, query_len), -1, dtype=np.int64)
    rows, columns = np.nonzero(used)
    slots[rows, columns] = resident.tables.slots(rows, positions[rows, columns], resident.block_size)
    host.slots[:] = slots.reshape(-1)
    host.positions[:] = positions.reshape(-1)
    host.query_starts[:] = np.arange(size + 1) * query_len
    host.context_lens[:count] = starts[:count] + query_len
    host.context_lens[count:] = 0
    if has_options:
        put_padding(host, count * query_len)


def fill_mixed(host: HostFields, items: list[ScheduledSequence], lengths: list[int], resident: ResidentState) -> None:
    """Write a step with prompts in it; ``lengths`` counts each item's tokens and drafts."""
    count = len(items)
    host.source_rows[:] = -1
    host.query_starts[0] = 0
    np.cumsum(lengths, out=host.query_starts[1 : count + 1])
    row = 0
    for index, (item, length) in enumerate(zip(items, lengths, strict=True)):
        sequence, first = item.sequence, int(host.query_starts[index])
        end = item.start + item.num_tokens
        resident.tables.set(index, sequence.block_table)
        known = sequence.token_ids[item.start : end]
        host.token_ids[first : first + len(known)] = known
        if len(known) < item.num_tokens:
            host.token_ids[first + len(known)] = 0
            host.source_rows[first + len(known)] = resident.row_of[id(sequence)]
        if item.num_drafts:
            host.token_ids[first + item.num_tokens : first + length] = sequence.draft_ids
        positions = np.arange(item.start, item.start + length)
        host.positions[first : first + length] = positions
        host.slots[first : first + length] = resident.tables.slots(
            np.full(length, index), positions, resident.block_size
        )
        host.context_lens[index] = item.start + length
        if item.draws:
            put_row(host, row, sequence, sequence.num_tokens)
            num_rows = item.num_drafts + 1
            last = first + item.num_tokens - 1
            host.rows[row : row + num_rows] = np.arange(last, last + num_rows)
            row += num_rows
    # Padding: tokens of nobody, whose keys go nowhere, sequences without a context, rows nobody looks at.
    end = int(host.query_starts[count])
    host.query_starts[count + 1 :] = end
    host.context_lens[count:] = 0
    host.token_ids[end:] = host.positions[end:] = 0
    host.slots[end:] = -1
    host.rows[row:] = 0
    put_padding(host, row)
