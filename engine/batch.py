"""Lays out one step of a model: flat tokens of any number of sequences, and where their keys and values live."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Holds one step's input: T tokens of B sequences, laid end to end; decode is a query of one token.

    Sequence b owns the flat rows ``query_start[b]:query_start[b + 1]``. Its query's last token sits at position
    ``context_lens[b] - 1``, so ``context_lens`` counts the keys present *after* this step. Every row's key and value is
    written to ``slot_mapping`` before attention reads the cache.

    The host lists repeat what the CPU path (and any launch decision) needs, so that nobody reads a device tensor back.

    Attributes
    ----------
    token_ids : int64 (T,)
    positions : int64 (T,), 0-based position of each token in its sequence
    slot_mapping : int64 (T,), ``block_id * block_size + offset``
    query_start : int32 (B + 1,)
    context_lens : int32 (B,)
    block_tables : int32 (B, max_blocks), rows padded with any valid block id
    query_lens, context_lens_host, block_tables_host : the same as Python lists; host tables are unpadded
    logits_rows : int64 (R,), the flat rows whose logits are wanted
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_lens: list[int]
    context_lens_host: list[int]
    block_tables_host: list[list[int]]
    logits_rows: Tensor

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @classmethod
    def build(
        cls,
        tokens: list[list[int]],
        context_lens: list[int],
        block_tables: list[list[int]],
        *,
        block_size: int,
        all_logits: bool = False,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Lay out one step from host lists.

        Parameters
        ----------
        tokens : the new tokens of each sequence, at least one each
        context_lens : each sequence's length once these tokens are in
        block_tables : each sequence's block ids, covering its context
        all_logits : want every row's logits, not only each sequence's last
        """
        query_lens = [len(t) for t in tokens]
        flat = [token for sequence in tokens for token in sequence]
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for num_new, length, table in zip(query_lens, context_lens, block_tables, strict=True):
            for position in range(length - num_new, length):
                positions.append(position)
                slots.append(table[position // block_size] * block_size + position % block_size)
            starts.append(starts[-1] + num_new)
        width = max(len(table) for table in block_tables)
        padded = [table + [table[-1]] * (width - len(table)) for table in block_tables]
        rows = list(range(len(flat))) if all_logits else [end - 1 for end in starts[1:]]

        def put(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            token_ids=put(flat, torch.int64),
            positions=put(positions, torch.int64),
            slot_mapping=put(slots, torch.int64),
            query_start=put(starts, torch.int32),
            context_lens=put(context_lens, torch.int32),
            block_tables=put(padded, torch.int32),
            query_lens=query_lens,
            context_lens_host=list(context_lens),
            block_tables_host=block_tables,
            logits_rows=put(rows, torch.int64),
        )
