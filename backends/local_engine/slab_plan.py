"""Plans how a device's shared memory for KV would be cut, before anything is loaded."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.slabs import blocks_per_slab, slab_bytes_for

_BLOCK_SIZE = EngineConfig().block_size


def slabs_in(kv_bytes: int) -> tuple[int, int]:
    """Return the bytes of a slab, and how many of them that much memory holds."""
    slab_bytes = slab_bytes_for(kv_bytes)
    return slab_bytes, kv_bytes // slab_bytes


def slabs_for(num_tokens: int, kv_bytes_per_token: int, slab_bytes: int) -> int:
    """Return how many slabs the keys and values of so many tokens take."""
    per_slab = blocks_per_slab(slab_bytes, kv_bytes_per_token * _BLOCK_SIZE)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    return -(-num_blocks // max(per_slab, 1))
