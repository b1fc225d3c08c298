"""Puts a rank's shard of a checkpoint together as an ordinary decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.layers.linear import Linear
from engine.layers.quant import QuantWeight
from engine.load.linear import LinearFactory, LinearPart
from engine.load.model import Assembler, ProgressFn
from engine.load.tensors import TensorSource
from engine.models.decoder import DecoderModel
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard, cut_inputs, cut_outputs, cut_vocabulary, is_cut_by_inputs, shard_config


class CollectiveLinear:
    """Makes a rank's part of a linear layer whole: summed, or laid side by side and cut to ``out_features``."""

    def __init__(self, part: Linear, ranks: Ranks, how: Literal["sum", "gather"], out_features: int) -> None:
        self._part = part
        self._ranks = ranks
        self._how = how
        self.in_features = part.in_features
        self.out_features = out_features

    def __call__(self, x: Tensor) -> Tensor:
        out = self._part(x)
        if self._how == "sum":
            return self._ranks.add_up(out)
        return self._ranks.gather_last(out)[..., : self.out_features]

    @property
    def weight_bytes(self) -> int:
        return self._part.weight_bytes


class ShardAssembler(Assembler):
    """Reads whole tensors and keeps this rank's part of each."""

    def __init__(self, files: TensorSource, config: ModelConfig, factory: LinearFactory, ranks: Ranks) -> None:
        super().__init__(files, config, factory)
        self._ranks = ranks
        self._shard = Shard(ranks.rank, ranks.size)

    @property
    def built_config(self) -> ModelConfig:
        return shard_config(self.config, self._ranks.size)

    def build(self, last_name: str, parts: list[LinearPart]) -> Linear:
        if is_cut_by_inputs(last_name):
            made = self.factory.build([self._by_inputs(part) for part in parts])
            return CollectiveLinear(made, self._ranks, "sum", made.out_features)
        if last_name == "lm_head":
            made = self.factory.build([replace(parts[0], weight=cut_vocabulary(parts[0].weight, self._shard))])
            return CollectiveLinear(made, self._ranks, "gather", self.config.vocab_size)
        return self.factory.build([self._by_outputs(part) for part in parts])

    def build_gated(self, gate: LinearPart, up: LinearPart) -> Linear:
        return self.factory.build_gated(self._by_outputs(gate), self._by_outputs(up))

    def _by_outputs(self, part: LinearPart) -> LinearPart:
        bias = None if part.bias is None else part.bias[self._shard.part(part.bias.shape[0])]
        return replace(part, weight=cut_outputs(part.weight, self._shard), bias=bias)

    def _by_inputs(self, part: LinearPart) -> LinearPart:
        weight: Tensor | QuantWeight = cut_inputs(part.weight, self._shard)
        # Every rank's part is summed, so only one of them may bring the bias.
        bias = part.bias if part.bias is None or self._shard.rank == 0 else torch.zeros_like(part.bias)
        return replace(part, weight=weight, bias=bias)


def assemble_shard(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    ranks: Ranks,
    progress: ProgressFn | None = None,
) -> DecoderModel:
    """Assemble one rank's model. Its ``config`` has the rank's heads; what goes in and comes out is whole.

    Raises
    ------
    UnsupportedModel
        The model cannot be cut so.
    """
    with torch.inference_mode():
        factory = LinearFactory(dtype, ranks.device)
        return ShardAssembler(source, config, factory, ranks).assemble(progress or (lambda share: None))
