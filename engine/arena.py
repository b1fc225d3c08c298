"""Shares one run of a device's memory between the keys and values of all its models, in slabs (:mod:`engine.slabs`).

Addresses never change: a model's blocks are laid over the whole memory once, so captured graphs stay valid while slabs
move. Engines run on streams of their own; who gets a slab waits, on its stream, for what its last holder had asked for
before it let go. A slab that changes hands is zeroed: no model ever reads, even masked, what another wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import OutOfMemoryPlan
from engine.kv_cache import KVCache, kv_bytes_per_token
from engine.slabs import SharedPool, Slabs, blocks_per_slab, slab_bytes_for


class Arena:
    """Holds the memory, and makes the pools over it.

    Parameters
    ----------
    num_bytes : what the keys and values of all models on the device may take; rounded down to whole slabs
    device : where
    slab_bytes : None chooses by :func:`slab_bytes_for`

    Raises
    ------
    OutOfMemoryPlan
        The device has not so much left, or it is less than one slab.
    """

    def __init__(self, num_bytes: int, device: torch.device | str, *, slab_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        slab_bytes = slab_bytes or slab_bytes_for(num_bytes)
        num_slabs = num_bytes // slab_bytes
        if not num_slabs:
            raise OutOfMemoryPlan(
                f"{num_bytes:,} bytes for keys and values on {self.device} are less than one slab of {slab_bytes:,}.",
                needed_bytes=slab_bytes,
                free_bytes=num_bytes,
            )
        try:
            self.storage = torch.zeros(num_slabs * slab_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # torch's out-of-memory errors on any device
            raise OutOfMemoryPlan(
                f"{self.device} has no {num_slabs * slab_bytes:,} bytes left for keys and values "
                f"({str(error).splitlines()[0]}). Lower its kv_bytes.",
                needed_bytes=num_slabs * slab_bytes,
                free_bytes=torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0,
            ) from error
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the engines' streams do not wait for the one that wrote the zeros
        self.slabs = Slabs(num_slabs, slab_bytes)

    def lay_out(self, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVCache:
        """Lay a model's blocks over the whole memory; which of them it may use, its pool says.

        Raises
        ------
        OutOfMemoryPlan
            A slab does not hold a block of this shape.
        """
        block_bytes = kv_bytes_per_token(config, dtype) * block_size
        if not blocks_per_slab(self.slabs.slab_bytes, block_bytes):
            raise OutOfMemoryPlan(
                f"A KV block of {block_size} tokens takes {block_bytes:,} bytes, which a slab of {self.device} "
                f"({self.slabs.slab_bytes:,} bytes) does not surely hold. Give the device more kv_bytes.",
                needed_bytes=block_bytes,
                free_bytes=self.slabs.slab_bytes,
            )
        num_blocks = self.storage.numel() // block_bytes
        return KVCache(config, num_blocks, block_size, dtype=dtype, device=self.device, storage=self.storage)

    def join(self, name: str, kv: KVCache, *, min_tokens: int) -> SharedPool:
        """Make the pool of one user of the memory, perhaps one of several of a model.

        On a GPU, whoever asks it for room does so on the stream that will use the blocks, always the same one.

        Parameters
        ----------
        name : for messages
        kv : from :meth:`lay_out`
        min_tokens : that many always fit

        Raises
        ------
        OutOfMemoryPlan
            See :meth:`engine.slabs.Slabs.join`.
        """
        return self.slabs.join(
            name,
            block_bytes=kv.block_bytes,
            block_size=kv.block_size,
            min_blocks=-(-min_tokens // kv.block_size),
            handover=_ArenaHandover(self.storage, self.slabs.slab_bytes),
        )


@dataclass(slots=True)
class _ArenaHandover:
    """Implements :class:`engine.slabs.SlabHandover` with the events of the stream that the first slab is taken on."""

    storage: Tensor
    slab_bytes: int
    stream: torch.cuda.Stream | None = None

    def leave(self) -> object:
        if self.stream is None:
            return None
        try:
            return self.stream.record_event()
        except RuntimeError:  # the device is lost, and no order with it
            return None

    def enter(self, slab: int, mark: object, *, is_foreign: bool) -> None:
        region = self.storage[slab * self.slab_bytes : (slab + 1) * self.slab_bytes]
        if self.storage.is_cuda:
            self.stream = self.stream or torch.cuda.current_stream(self.storage.device)
            if isinstance(mark, torch.cuda.Event):
                self.stream.wait_event(mark)
        if is_foreign:
            region.zero_()
