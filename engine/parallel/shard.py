"""Cuts a rank's part out of a model: its heads, its part of the MLP, and everything else whole.

Projections are cut as in Shoeybi et al. 2019, "Megatron-LM", section 3: queries, keys, values, gate and up by outputs,
so that a rank has whole heads; the two that lead back to the residual stream by inputs, so that their parts need only
be added up. The embedding is whole on every rank; the head is cut by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.layers.quant import QuantWeight


@dataclass(frozen=True, slots=True)
class Shard:
    """Stands for rank ``rank`` of ``size``."""

    rank: int
    size: int

    def part(self, whole: int) -> slice:
        """Return this rank's run of ``whole`` equal things."""
        each = whole // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config of one rank's model: its share of heads and of the MLP.

    Raises
    ------
    UnsupportedModel
        Something does not divide by ``size``.
    """
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % size:
            raise UnsupportedModel(f"tensor_parallel is {size}; expected a divisor of {name}={value}.")
    quant = config.quant
    if quant is not None and quant.group_size > 0:
        for name, inputs in (("q_size", config.q_size), ("intermediate_size", config.intermediate_size)):
            if (inputs // size) % quant.group_size:
                raise UnsupportedModel(
                    f"tensor_parallel is {size}; {name}={inputs} then has no whole groups of {quant.group_size} a rank."
                )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def cut_outputs(weight: Tensor | QuantWeight, shard: Shard) -> Tensor | QuantWeight:
    """Return the rows of (out, in) that this rank computes."""
    if isinstance(weight, Tensor):
        return weight[shard.part(weight.shape[0])].contiguous()
    rows = shard.part(weight.out_features)
    return replace(
        weight,
        packed=weight.packed[rows].contiguous(),
        scales=weight.scales[rows].contiguous(),
        zeros=weight.zeros[rows].contiguous(),
    )


def cut_vocabulary(weight: Tensor | QuantWeight, shard: Shard) -> Tensor | QuantWeight:
    """Return this rank's rows of the head; sizes that do not divide are filled up with rows of zeros."""
    if isinstance(weight, Tensor):
        return cut_outputs(F.pad(weight, (0, 0, 0, -weight.shape[0] % shard.size)), shard)
    if weight.out_features % shard.size:
        raise UnsupportedModel(f"A 4-bit head of {weight.out_features} outputs cannot be cut in {shard.size}.")
    return cut_outputs(weight, shard)


def cut_inputs(weight: Tensor | QuantWeight, shard: Shard) -> Tensor | QuantWeight:
    """Return the columns of (out, in) whose inputs this rank has.

    Raises
    ------
    UnsupportedModel
        Activation-ordered GPTQ: a group's inputs lie on several ranks.
    """
    if isinstance(weight, Tensor):
        return weight[:, shard.part(weight.shape[1])].contiguous()
    if weight.order is not None:
        raise UnsupportedModel(
            "Activation-ordered GPTQ weights (desc_act) cannot be cut by inputs; take a checkpoint without desc_act."
        )
    columns, groups = shard.part(weight.in_features // 2), shard.part(weight.scales.shape[1])
    return replace(
        weight,
        packed=weight.packed[:, columns].contiguous(),
        scales=weight.scales[:, groups].contiguous(),
        zeros=weight.zeros[:, groups].contiguous(),
    )


def is_cut_by_inputs(name: str) -> bool:
    """Tell whether a projection leads back to the residual stream."""
    return name.endswith(("o_proj", "down_proj"))
