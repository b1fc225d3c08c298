"""Holds the model that an engine sees, and the ranks that compute along.

Rank 0 lives in the engine's process: its scheduler, sampler and books are those of one GPU. Each call of the model is
told to the other ranks, each a process of its own that runs :func:`engine.parallel.follower.follow`, and all of them
compute their shard.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config import ModelConfig
from engine.device.step_buffers import StepForm
from engine.errors import RankLost
from engine.kv_cache import KVCache
from engine.layers.linear import Linear
from engine.models.decoder import DecoderModel
from engine.models.fused import FusedDecoder
from engine.parallel.rank_orders import RankOrder, batch_header, header, pack, step_header
from engine.parallel.rank_watchdog import RankWatchdog
from engine.parallel.ranks import BROKEN, Ranks

logger = logging.getLogger(__name__)


class ParallelModel:
    """Stands for a model cut over ranks, on rank 0; what :class:`engine.engine.Engine` takes for a model.

    Calls from several threads (engines that share the weights) take turns, on the device too: the other ranks compute
    one after the other what they are told.

    Parameters
    ----------
    shard : rank 0's own part
    ranks : the links
    workers : processes of the other ranks, watched and ended with this object
    """

    def __init__(self, shard: DecoderModel, ranks: Ranks, workers: Sequence[BaseProcess] = ()) -> None:
        self.shard = shard
        self.ranks = ranks
        self.dtype = shard.dtype
        self.device = shard.device
        self.prefers_fused = shard.prefers_fused
        self._workers = workers
        self._lock = threading.RLock()
        self._pools: dict[int, int] = {}
        self._num_pools = 0
        self._dropped: list[int] = []
        self._lost: str | None = None
        self._last: torch.cuda.Event | None = None  # the end of the last turn on the device
        self._watch = RankWatchdog(workers, self._let_go)

    @property
    def config(self) -> ModelConfig:
        """Return the shard's: its KV heads are what a pool here must hold, everything a caller sees is whole."""
        return self.shard.config

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of this rank."""
        return self.shard.weight_bytes

    @property
    def fused(self) -> FusedDecoder:
        """Return the shard's, for steps that were announced: it waits for the other ranks to compute them too."""
        return self.shard.fused

    @property
    def lm_head(self) -> Linear:
        """Return the shard's; see :attr:`fused`."""
        return self.shard.lm_head

    def forward(self, batch: Batch, kv: KVCache) -> Tensor:
        """See :meth:`engine.models.decoder.DecoderModel.forward`.

        Raises
        ------
        RankLost
            Another rank died or does not answer; the model is of no use any more.
        """
        with self.turn():
            self.ranks.tell(batch_header(self._pool(kv), batch))
            self.ranks.tell(pack(batch))
            return self.shard.forward(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :meth:`engine.models.decoder.DecoderModel.logits`; raises as :meth:`forward` does."""
        with self.turn():
            self.ranks.tell(header(RankOrder.LOGITS, hidden.shape[0]))
            self.ranks.share(hidden.contiguous())
            return self.shard.logits(hidden)

    # Steps of a runner

    def prepare(self, kv: KVCache, num_bytes: int, tables: Tensor) -> int:
        """Let the other ranks have room for a runner's input and for block tables of this shape; the pool's number."""
        with self.turn():
            number = self._pool(kv)
            self.ranks.tell(header(RankOrder.PREPARE, number, num_bytes, *tables.shape))
            return number

    def announce(self, pool: int, form: StepForm, graph: int, tables: Tensor) -> None:
        """Tell of a step, and hand over what changed of the block tables; within a turn."""
        self.ranks.tell(step_header(pool, form, graph, tables))
        if tables.numel():
            self.ranks.share(tables.contiguous())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep others from asking anything of the ranks meanwhile; what is asked comes after what was asked before.

        Raises
        ------
        RankLost
        """
        with self._lock, self._watch.limit():
            self._check()
            try:
                self._begin_turn()
                yield
                self._end_turn()
            except BROKEN as error:
                raise self._lose(error) from error

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Let results be waited for.

        Raises
        ------
        RankLost
            They never came.
        """
        with self._watch.limit():
            yield
        self._check()

    def close(self) -> None:
        """Let the other ranks end. Idempotent."""
        with self._lock:
            if self._lost is None:
                self._lost = "closed"
                self._watch.stop()
                with contextlib.suppress(*BROKEN):  # they may be gone already
                    self.ranks.tell(header(RankOrder.STOP))
        for worker in self._workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()

    def _begin_turn(self) -> None:
        while self._dropped:
            self.ranks.tell(header(RankOrder.DROP_KV, self._dropped.pop()))
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last)

    def _end_turn(self) -> None:
        if self.device.type == "cuda":
            self._last = torch.cuda.current_stream(self.device).record_event(self._last)

    def _check(self) -> None:
        if self._lost is not None:
            raise RankLost(f"The model's other ranks are gone ({self._lost}); load it again.")

    def _lose(self, error: Exception) -> RankLost:
        self._lost = self._lost or f"{type(error).__name__}: {error}"[:200]
        self._watch.alarm(self._lost)
        return RankLost(f"A rank of the model was lost: {self._lost}")

    def _let_go(self, reason: str) -> None:
        """End the other ranks, and what waits for them here: none can go on without the others."""
        self._lost = self._lost or reason
        logger.error("a model over %d GPUs is lost: %s", self.ranks.size, self._lost)
        for worker in self._workers:
            worker.kill()
        self.ranks.abort()

    def _pool(self, kv: KVCache) -> int:
        """Return the number under which the other ranks know a pool; the first time, they make theirs."""
        known = self._pools.get(id(kv))
        if known is not None:
            return known
        self._num_pools += 1
        number = self._pools[id(kv)] = self._num_pools
        self.ranks.tell(header(RankOrder.MAKE_KV, number, kv.num_blocks, kv.block_size))
        kv.on_clear = lambda block_ids: self._clear(number, block_ids)
        weakref.finalize(kv, self._forget, id(kv), number)
        return number

    def _clear(self, pool: int, block_ids: list[int]) -> None:
        with self._lock:
            if self._lost is None and block_ids:
                self.ranks.tell(header(RankOrder.CLEAR, pool, len(block_ids)))
                self.ranks.tell(torch.tensor(block_ids, dtype=torch.int64))

    def _forget(self, kv_id: int, pool: int) -> None:
        # A finalizer may run in the middle of anything, so the others are told when the next turn begins.
        self._pools.pop(kv_id, None)
        self._dropped.append(pool)
