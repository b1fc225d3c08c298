"""Lets the other ranks compute along with rank 0, as it says."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from engine.device.graph_cache import GraphCache
from engine.device.runner import step_tensors
from engine.device.step_buffers import StepForm, device_fields
from engine.kv_cache import KVCache
from engine.models.decoder import DecoderModel
from engine.parallel.rank_orders import HEADER, RankOrder, form_of, packed_length, unpack
from engine.parallel.ranks import Ranks


def follow(shard: DecoderModel, ranks: Ranks) -> None:
    """Compute along with rank 0 until it says stop.

    Raises
    ------
    RuntimeError, OSError, EOFError
        Rank 0 is gone, or a step failed here.
    """
    is_cuda = shard.device.type == "cuda"
    # One stream for all engines that rank 0 has on this model; captures need another than the default one.
    stream = torch.cuda.Stream(shard.device) if is_cuda else None  # type: ignore[no-untyped-call]
    with nullcontext() if stream is None else torch.cuda.stream(stream), torch.inference_mode():
        if is_cuda:
            torch.cuda.synchronize(shard.device)  # weights were written on another stream
        follower = _Follower(shard, ranks)
        while follower.obey():
            pass


class _Follower:
    def __init__(self, shard: DecoderModel, ranks: Ranks) -> None:
        self._shard = shard
        self._ranks = ranks
        self._pools: dict[int, KVCache] = {}
        self._steps: dict[int, FollowerSteps] = {}

    def obey(self) -> bool:
        """Do what one order says; False if it says stop."""
        head: list[int] = self._ranks.hear().tolist()
        assert len(head) == HEADER, head
        order, pool = RankOrder(head[0]), head[1]
        shard, ranks = self._shard, self._ranks
        if order is RankOrder.STOP:
            return False
        if order is RankOrder.STEP:
            self._steps[pool].run(head)
        elif order is RankOrder.MAKE_KV:
            self._pools[pool] = KVCache(shard.config, head[2], head[3], dtype=shard.dtype, device=shard.device)
        elif order is RankOrder.DROP_KV:
            del self._pools[pool]
            self._steps.pop(pool, None)
        elif order is RankOrder.CLEAR:
            self._pools[pool].clear(ranks.hear().tolist())
        elif order is RankOrder.PREPARE:
            self._steps[pool] = FollowerSteps(shard, self._pools[pool], ranks, head)
        elif order is RankOrder.FORWARD:
            body = ranks.hear()
            assert body.numel() == packed_length(head), head
            shard.forward(unpack(head, body, shard.device), self._pools[pool])
        else:
            hidden = torch.empty(head[1], shard.config.hidden_size, dtype=shard.dtype, device=shard.device)
            shard.logits(ranks.share(hidden))
        return True


class FollowerSteps:
    """Runs the steps of one engine, whose input comes from rank 0's device to the same places of this one's.

    A step is captured here when it is captured there: both count the runs of a graph alike.
    """

    def __init__(self, shard: DecoderModel, kv: KVCache, ranks: Ranks, head: list[int]) -> None:
        _, pool, num_bytes, rows, columns = head[:5]
        self._shard = shard
        self._kv = kv
        self._ranks = ranks
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=shard.device)
        self._tables = torch.zeros((rows, columns), dtype=torch.int32, device=shard.device)
        name = f"rank {ranks.rank}, pool {pool}"
        self._graphs = GraphCache(name, enabled=shard.device.type == "cuda", agree=ranks.agree)

    def run(self, head: list[int]) -> None:
        """Take part in the step that a header announces."""
        form, (graph, rows, columns) = form_of(head), head[7:10]
        if columns:
            changed = self._tables.new_empty((rows, columns))
            self._tables[:rows, :columns] = self._ranks.share(changed)
        if graph:
            self._graphs.run(graph, lambda: self._compute(form))
        else:
            self._compute(form)

    def _compute(self, form: StepForm) -> None:
        shape = form.shape
        self._ranks.share(self._bytes[: shape.num_bytes])
        fields = device_fields(self._bytes, shape)
        step = step_tensors(fields, self._tables[: shape.num_sequences], form.max_query_len)
        hidden = self._shard.fused.forward(step, self._kv)
        if form.by_rows:
            hidden = hidden.index_select(0, fields.rows)
        if hidden.shape[0]:
            self._shard.lm_head(hidden)
