"""Holds the paged pool of keys and values of one model, and the arithmetic of how large it may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import OutOfMemoryPlan

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Says how many blocks a pool gets, with the numbers it rests on."""

    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def plan_kv(
    config: ModelConfig,
    free_bytes: int,
    *,
    dtype: torch.dtype,
    block_size: int = 16,
    share: float = 0.9,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
) -> KVPlan:
    """Size a pool from what is free, or refuse with the arithmetic.

    Parameters
    ----------
    free_bytes : memory left after weights
    share : the part of it the pool may take
    max_tokens : no more than this many tokens are useful (None: as many as fit)
    min_tokens : the pool must hold this many (None: one full context)

    Raises
    ------
    OutOfMemoryPlan
        ``min_tokens`` do not fit into ``share * free_bytes``.
    """
    per_token = kv_bytes_per_token(config, dtype)
    per_block = per_token * block_size
    usable = int(max(free_bytes, 0) * share)
    needed_tokens = config.context_length if min_tokens is None else min_tokens
    needed_blocks = -(-needed_tokens // block_size)
    num_blocks = usable // per_block
    if num_blocks < needed_blocks:
        raise OutOfMemoryPlan(
            f"The KV cache needs {needed_blocks} blocks x {block_size} tokens x {per_token} bytes/token "
            f"(2 x {config.num_layers} layers x {config.num_kv_heads} KV heads x {config.head_dim} x "
            f"{dtype.itemsize} B) "
            f"= {needed_blocks * per_block:,} bytes for {needed_tokens} tokens, but {share:.0%} of the "
            f"{free_bytes:,} bytes free is {usable:,}. Shorten the context, free memory, or use a smaller KV dtype.",
            needed_bytes=needed_blocks * per_block,
            free_bytes=free_bytes,
        )
    if max_tokens is not None:
        num_blocks = min(num_blocks, max(needed_blocks, -(-max_tokens // block_size)))
    return KVPlan(int(num_blocks), block_size, per_block)


class KVCache:
    """Holds the keys and values of one model's blocks; who owns a block is not known here.

    In memory of its own each layer is one run of blocks. In memory that models of other shapes use too, each block is
    one run of layers, so that a block takes a place of its own whatever the model. Keys come first in the axis of two,
    and are stored after RoPE.

    Parameters
    ----------
    storage : uint8 (bytes,), zeros, of which as many blocks are made as fit in ``num_blocks``; None: memory of its own

    Attributes
    ----------
    layers : one view per layer, (num_blocks, block_size, 2, num_kv_heads, head_dim), where shared with a block strided
    slots : one view per layer, (rows, 2 * num_kv_heads, head_dim): one row is one token's keys, then its values; which
        row is a token's, :meth:`rows_of` says
    kv_bytes, block_bytes : of all blocks, and of one
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        storage: Tensor | None = None,
    ) -> None:
        num_layers, shape = config.num_layers, (block_size, 2, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Told of cleared blocks: a pool cut over several devices has parts elsewhere.
        self.on_clear: Callable[[list[int]], None] | None = None
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_bytes = num_layers * prod(shape) * dtype.itemsize
        self.kv_bytes = num_blocks * self.block_bytes
        if storage is None:
            # Zeros, not empty: padded block-table entries are read and masked, and 0 * NaN would survive the mask.
            runs = [torch.zeros((num_blocks, *shape), dtype=dtype, device=device) for _ in range(num_layers)]
            self.layers: list[Tensor] = runs
            self._gap = 0  # rows of other layers between one block and the next
        else:
            blocks = storage[: self.kv_bytes].view(dtype).view(num_blocks, num_layers, *shape)
            runs = [blocks.view(-1, *shape)[layer:] for layer in range(num_layers)]
            self.layers = list(blocks.unbind(1))
            self._gap = (num_layers - 1) * block_size
        self.slots: list[Tensor] = [run.view(-1, 2 * config.num_kv_heads, config.head_dim) for run in runs]

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return where ``slots`` has the places ``block_id * block_size + offset``, int64 (T,); alike in all layers."""
        return slots + slots // self.block_size * self._gap if self._gap else slots

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks whose owner produced a NaN, so that no later owner's masked reads meet it."""
        for layer in self.layers:
            layer[block_ids] = 0
        if self.on_clear is not None:
            self.on_clear(block_ids)
