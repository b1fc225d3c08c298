"""Holds the arguments that a step's attention shares over all layers, and a layer's norms of heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Says where T tokens of S sequences lie in the paged cache; alike in every layer.

    Attributes
    ----------
    block_tables : int32 (S, max_blocks); entries past a sequence's context may hold anything
    context_lens : int32 (S,), keys present after this step; 0: a padding sequence
    query_starts : int32 (S + 1,); sequence s owns rows ``query_starts[s]:query_starts[s + 1]``, its last query sits at
        position ``context_lens[s] - 1``
    slots : int64 (T,), ``block_id * block_size + offset`` of each token; below 0: its key and value are not written
    max_query_len : the longest query, known on the host
    """

    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor
    slots: Tensor
    max_query_len: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Holds weights (D,) of a root-mean-square norm of each query and key head, None where a model has none."""

    query: Tensor | None = None
    key: Tensor | None = None
    eps: float = 1e-6


NO_NORMS = HeadNorms()
