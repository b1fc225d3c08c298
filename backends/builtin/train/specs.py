"""Says what each tier is and studies; no torch here, so that data workers start fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from backends.builtin.conversations import TrainingMix
from backends.builtin.tokenizer import CONTEXT_LENGTH, VOCAB_SIZE

RMS_NORM_EPS = 1e-5
ROPE_THETA = 10_000.0
BITS = 4


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Holds the shape, quantisation and schooling of one tier; sizes divide by ``group_size``."""

    tier: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    learning_rate: float
    mix: TrainingMix
    quantization: Literal["gptq", "awq"] = "gptq"
    group_size: int = 64
    num_kv_heads: int = 2
    tokens_per_step: int = 65_536
    vocab_size: int = VOCAB_SIZE
    context_length: int = CONTEXT_LENGTH

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def _grades(*weights: float) -> Mapping[int, float]:
    return MappingProxyType(dict(enumerate(weights, 1)))


# Tiers 1 and 2 also learn to think, less: tier 1 drafts for tier 4. The hard grades are worth little effort where they
# cannot be answered at once anyway. A document that thinks is some four times as long as one that does not: at 0.25
# more than half of tier 3's positions think.
SPECS: Mapping[int, TierSpec] = MappingProxyType(
    {
        1: TierSpec(
            tier=1,
            hidden_size=128,
            num_layers=3,
            num_heads=4,
            intermediate_size=384,
            learning_rate=4e-3,
            mix=TrainingMix(0.15, _grades(0.55, 0.28, 0.10, 0.04, 0.03), _grades(0.2, 0.2, 0.2, 0.2, 0.2)),
        ),
        2: TierSpec(
            tier=2,
            hidden_size=256,
            num_layers=4,
            num_heads=4,
            intermediate_size=768,
            learning_rate=3e-3,
            mix=TrainingMix(0.05, _grades(0.30, 0.36, 0.22, 0.08, 0.04), _grades(0.2, 0.2, 0.2, 0.2, 0.2)),
        ),
        3: TierSpec(
            tier=3,
            hidden_size=384,
            num_layers=10,
            num_heads=6,
            intermediate_size=1024,
            quantization="awq",
            group_size=128,
            learning_rate=2.5e-3,
            mix=TrainingMix(0.25, _grades(0.12, 0.26, 0.32, 0.20, 0.10), _grades(0.12, 0.16, 0.20, 0.25, 0.27)),
        ),
    }
)
