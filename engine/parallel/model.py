"""The model that an engine sees, and the ranks that compute along.

Rank 0 lives in the engine's process: its scheduler, sampler and books are those of one GPU. Each call of the model is
told to the other ranks, each a process of its own that runs :func:`follow`, and all of them compute their shard.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.errors import RankLost
from engine.kv_cache import KVCache
from engine.models.decoder import DecoderModel
from engine.parallel.orders import HEADER, Order, batch_header, header, pack, packed_length, unpack
from engine.parallel.ranks import Ranks


class ParallelModel:
    """Rank 0's face of a model cut over ranks; what :class:`engine.engine.Engine` takes for a model.

    Calls from several threads (engines that share the weights) take turns. CUDA graphs and steps launched ahead are not
    for this model: every step begins with an order to the other ranks.

    Parameters
    ----------
    shard : rank 0's own part
    ranks : the links
    workers : processes of the other ranks, watched and ended with this object
    """

    prefers_fused = False

    def __init__(self, shard: DecoderModel, ranks: Ranks, workers: Sequence[object] = ()) -> None:
        self.shard = shard
        self.dtype = shard.dtype
        self.device = shard.device
        self._ranks = ranks
        self._workers = workers
        self._lock = threading.Lock()
        self._pools: dict[int, int] = {}
        self._num_pools = 0
        self._lost: str | None = None

    @property
    def config(self) -> ModelConfig:
        """The shard's: its KV heads are what a pool here must hold, everything a caller sees is whole."""
        return self.shard.config

    @property
    def weight_bytes(self) -> int:
        """Of this rank."""
        return self.shard.weight_bytes

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """See :meth:`engine.models.decoder.DecoderModel.forward`.

        Raises
        ------
        RankLost
            Another rank died or does not answer; the model is of no use any more.
        """
        with self._lock:
            try:
                self._check()
                pool = self._pool(kv)
                self._ranks.tell(batch_header(pool, batch))
                self._ranks.tell(pack(batch))
                return self.shard.forward(batch, kv)
            except RuntimeError as error:
                raise self._lose(error) from error

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`engine.models.decoder.DecoderModel.logits`."""
        with self._lock:
            try:
                self._check()
                self._ranks.tell(header(Order.LOGITS, hidden.shape[0]))
                self._ranks.share(hidden.contiguous())
                return self.shard.logits(hidden)
            except RuntimeError as error:
                raise self._lose(error) from error

    def close(self) -> None:
        """Let the other ranks end. Idempotent."""
        with self._lock:
            if self._lost is None:
                self._lost = "closed"
                with contextlib.suppress(RuntimeError):  # they may be gone already
                    self._ranks.tell(header(Order.STOP))
        for worker in self._workers:
            worker.join(10)  # type: ignore[attr-defined]
            if worker.is_alive():  # type: ignore[attr-defined]
                worker.kill()  # type: ignore[attr-defined]

    def _check(self) -> None:
        if self._lost is not None:
            raise RankLost(f"The model's other ranks are gone ({self._lost}); load it again.")
        if any(not worker.is_alive() for worker in self._workers):  # type: ignore[attr-defined]
            raise RuntimeError("a rank's process has ended")

    def _lose(self, error: RuntimeError) -> RankLost:
        self._lost = self._lost or str(error)[:200]
        return RankLost(f"A rank of the model was lost: {error}")

    def _pool(self, kv: KVCache) -> int:
        """The number under which the other ranks know a pool; the first time, they make theirs."""
        known = self._pools.get(id(kv))
        if known is not None:
            return known
        self._num_pools += 1
        number = self._pools[id(kv)] = self._num_pools
        self._ranks.tell(header(Order.MAKE_KV, number, kv.num_blocks, kv.block_size))
        kv.on_clear = lambda block_ids: self._clear(number, block_ids)
        weakref.finalize(kv, self._forget, id(kv), number)
        return number

    def _clear(self, pool: int, block_ids: list[int]) -> None:
        with self._lock:
            if self._lost is None and block_ids:
                self._ranks.tell(header(Order.CLEAR, pool, len(block_ids)))
                self._ranks.tell(torch.tensor(block_ids, dtype=torch.int64))

    def _forget(self, kv_id: int, pool: int) -> None:
        self._pools.pop(kv_id, None)
        # A finalizer may run inside any call that holds the lock; the pool is then dropped with the ranks.
        if self._lock.acquire(blocking=False):
            try:
                if self._lost is None:
                    with contextlib.suppress(RuntimeError):  # nobody may be left to drop it
                        self._ranks.tell(header(Order.DROP_KV, pool))
            finally:
                self._lock.release()


def follow(shard: DecoderModel, ranks: Ranks) -> None:
    """Compute along with rank 0 until it says stop; for every rank but 0.

    Raises
    ------
    RuntimeError
        Rank 0 is gone.
    """
    pools: dict[int, KVCache] = {}
    config, device = shard.config, shard.device
    while True:
        head: list[int] = ranks.tell(torch.empty(HEADER, dtype=torch.int64)).tolist()
        order, numbers = Order(head[0]), head[1:]
        if order is Order.STOP:
            return
        if order is Order.MAKE_KV:
            pools[numbers[0]] = KVCache(config, numbers[1], numbers[2], dtype=shard.dtype, device=device)
        elif order is Order.DROP_KV:
            del pools[numbers[0]]
        elif order is Order.CLEAR:
            block_ids = ranks.tell(torch.empty(numbers[1], dtype=torch.int64))
            pools[numbers[0]].clear(block_ids.tolist())
        elif order is Order.FORWARD:
            body = ranks.tell(torch.empty(packed_length(head), dtype=torch.int64))
            shard.forward(unpack(head, body, device), pools[numbers[0]])
        else:
            hidden = torch.empty(numbers[0], config.hidden_size, dtype=shard.dtype, device=device)
            shard.logits(ranks.share(hidden))
