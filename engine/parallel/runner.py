"""Runs plans on rank 0: as on one GPU, while the other ranks compute every step along."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from engine.config import EngineConfig
from engine.device.graph_cache import GraphCache
from engine.device.runner import DeviceRunner
from engine.device.step_buffers import DeviceFields, StepForm, StepShape
from engine.errors import RankLost
from engine.kv_cache import KVCache
from engine.models.fused import StepTensors
from engine.parallel.model import ParallelModel
from engine.runner import Flight, StepResult
from engine.scheduler import StepPlan


class ParallelRunner(DeviceRunner):
    """Implements :class:`engine.runner.StepRunner` for a model cut over GPUs.

    The host tells the other ranks which step comes, in 80 bytes; its input goes from device to device within the step,
    captured with it, once the tokens that the last step drew are in it. So the others need not know how tokens are
    drawn: only rank 0 does that.
    """

    def __init__(
        self, model: ParallelModel, kv: KVCache, config: EngineConfig, *, max_tokens_per_sequence: int, name: str
    ) -> None:
        super().__init__(model, kv, config, max_tokens_per_sequence=max_tokens_per_sequence, name=name)
        self._parallel = model
        self._pool = model.prepare(kv, self._bytes.numel(), self._tables.tensor)
        self._graph_of: dict[Hashable, int] = {}
        self.graphs = GraphCache(name, enabled=self._is_cuda, agree=model.ranks.agree)

    def launch(self, plan: StepPlan) -> Flight:
        with self._parallel.turn():
            return super().launch(plan)

    def collect(self, flight: Flight) -> list[StepResult]:
        try:
            with self._parallel.wait():
                return super().collect(flight)
        except RankLost:
            self.graphs.clear()  # the links can only be given up with the graphs that use them
            raise

    def close(self) -> None:
        super().close()
        self.graphs.clear()

    def _announce(self, form: StepForm, key: Hashable | None, tables: Tensor) -> None:
        graph = 0 if key is None else self._graph_of.setdefault(key, len(self._graph_of) + 1)
        self._parallel.announce(self._pool, form, graph, tables)

    def _with_tokens(self, step: StepTensors, fields: DeviceFields) -> StepTensors:
        complete = super()._with_tokens(step, fields)
        fields.token_ids.copy_(complete.token_ids)
        shape = StepShape(fields.token_ids.shape[0], fields.context_lens.shape[0], fields.rows.shape[0])
        self._parallel.ranks.share(self._bytes[: shape.num_bytes])
        return complete
