"""Plans a ladder on a device: weights, the KV cache that remains, and how many requests that serves at once.

The arithmetic: a device's memory less a reserve, less the weights (each checkpoint once, however many tiers use it),
is left for KV. With ``share`` of the requests in flight on each tier and ``context`` tokens a request, the number of
requests at once is ``kv_bytes / (context * sum(share * kv_bytes_per_token))``; a tier that drafts with another model
keeps that model's KV as well.

Models that share the device's memory for KV (``[devices.NAME]``) do so in slabs, and each is guaranteed as many as one
whole context of its own takes; what is left follows demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.config import LocalModelConfig, ModelConfig
from backends.footprint import Footprint, footprint, read_shape, shape_of
from backends.local_engine.engine_groups import engine_groups
from backends.local_engine.slab_plan import slabs_for, slabs_in
from policies.ladder import Ladder

GIB = 2**30
GB = 10**9

RESERVE = 0.1
"""Share of a device kept for activations, the libraries' own memory and fragmentation."""

DEVICES_BYTES: Mapping[str, int] = {
    "h200": 141 * GB,
    "h100": 80 * GB,
    "a100": 80 * GB,
    "a100-40": 40 * GB,
    "l40s": 48 * GB,
    "rtx-4090": 24 * GB,
    "l4": 24 * GB,
}

TYPICAL_SHARES = (0.60, 0.20, 0.15, 0.05)

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "torch_dtype": "float16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
}

REFERENCE_SHAPES: Mapping[str, Mapping[str, object]] = {
    "3b-int4": _LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "8b-int4": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b-int4": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
"""The Llama 3 family in 4 bits, as ``config.json`` would describe it."""


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """Describes one tier to plan: its model, the checkpoint behind it, and its drafter's when it has one.

    ``checkpoint`` identifies the weights: tiers with the same one share them. A remote tier has no footprint.
    ``context_length`` is the longest that it was configured to serve, None its model's own. Tiers with the same
    ``engine`` are served by one: they share its batch and its KV pool.
    """

    name: str
    model: str
    checkpoint: str
    footprint: Footprint | None
    drafter: Footprint | None = None
    context_length: int | None = None
    engine: str | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        own = self.footprint.kv_bytes_per_token if self.footprint else 0
        return own + (self.drafter.kv_bytes_per_token if self.drafter else 0)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Says what one tier takes and gets.

    ``weight_bytes`` is 0 where an earlier tier has loaded the same checkpoint, ``guaranteed_slabs`` where the engine is
    that of an earlier tier, which ``engine_of`` then names.
    """

    tier: PlannedTier
    share: float
    guaranteed_slabs: int
    weight_bytes: int
    kv_bytes: int
    num_kv_tokens: int
    concurrency: int
    engine_of: str | None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Lays out the whole ladder on one device.

    ``shortfall_bytes`` is above 0 when the weights, or weights and the shared memory for KV, do not fit; ``is_shared``
    says that there is such a memory, ``slab_bytes`` and ``num_slabs`` how it is, or would be, cut.
    """

    device: str
    memory_bytes: int
    reserve_bytes: int
    weight_bytes: int
    kv_bytes: int
    shortfall_bytes: int
    context_tokens: int
    concurrency: int
    tiers: tuple[TierPlan, ...]
    is_shared: bool
    slab_bytes: int
    num_slabs: int

    @property
    def guaranteed_slabs(self) -> int:
        return sum(each.guaranteed_slabs for each in self.tiers)

    @property
    def fits(self) -> bool:
        """Whether the weights, one request of this length on every local tier, and what is guaranteed have room."""
        if self.shortfall_bytes or (self.is_shared and self.guaranteed_slabs > self.num_slabs):
            return False
        return all(each.num_kv_tokens >= self.context_tokens for each in self._local)

    @property
    def _local(self) -> tuple[TierPlan, ...]:
        return tuple(each for each in self.tiers if each.tier.footprint is not None)


def make_plan(
    tiers: Sequence[PlannedTier],
    *,
    device: str,
    memory_bytes: int,
    context_tokens: int,
    shares: Sequence[float] | None = None,
    kv_bytes: int | None = None,
) -> CapacityPlan:
    """Lay a ladder out on a device.

    Parameters
    ----------
    tiers : the ladder, cheapest first
    memory_bytes : of the device
    context_tokens : prompt and answer of one request
    shares : each tier's part of the requests in flight, by default the typical 60/20/15/5 or equal ones
    kv_bytes : memory for KV that the models share, as configured; None: what is left, each model its own part

    Raises
    ------
    ValueError
        Shares that are not one number above 0 a tier.
    """
    shares = _normalised(shares, len(tiers))
    weights = _weights_once(tiers)
    reserve_bytes = int(memory_bytes * RESERVE)
    left = memory_bytes - reserve_bytes - sum(weights) - (kv_bytes or 0)
    is_shared = kv_bytes is not None
    if kv_bytes is None:
        kv_bytes = max(left, 0)
    slab_bytes, num_slabs = slabs_in(kv_bytes)
    if is_shared:
        kv_bytes = num_slabs * slab_bytes
    demand = sum(share * tier.kv_bytes_per_token for share, tier in zip(shares, tiers, strict=True))
    planned = tuple(
        _tier_plan(tier, share, weight, kv_bytes, demand, context_tokens, slab_bytes, _engine_of(tiers, index))
        for index, (tier, share, weight) in enumerate(zip(tiers, shares, weights, strict=True))
    )
    return CapacityPlan(
        device=device,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        weight_bytes=sum(weights),
        kv_bytes=kv_bytes if demand else 0,
        shortfall_bytes=max(-left, 0),
        context_tokens=context_tokens,
        concurrency=int(kv_bytes / (context_tokens * demand)) if demand else 0,
        tiers=planned,
        is_shared=is_shared,
        slab_bytes=slab_bytes,
        num_slabs=num_slabs,
    )


def reference_tiers() -> tuple[PlannedTier, ...]:
    """Return the reference ladder: 3B, 8B, 70B in 4 bits, and the 70B once more, drafted by the 3B."""
    small, medium, large = (footprint(shape_of(raw, name)) for name, raw in REFERENCE_SHAPES.items())
    return (
        PlannedTier("simple", "3b-int4", "3b-int4", small),
        PlannedTier("medium", "8b-int4", "8b-int4", medium),
        PlannedTier("complex", "70b-int4", "70b-int4", large, engine="70b-int4"),
        PlannedTier("expert", "70b-int4, thinking", "70b-int4", large, drafter=small, engine="70b-int4"),
    )


def planned_tiers(ladder: Ladder, models: Mapping[str, ModelConfig]) -> tuple[PlannedTier, ...]:
    """Return the tiers of a configuration, their shapes read from disk.

    Raises
    ------
    ModelLoadError
        A local model's ``config.json`` cannot be read or is not served.
    """
    groups = engine_groups(models)
    engines = {name: group.members[0] for name, group in groups.items()}
    return tuple(_planned(tier.name, tier.model, models, engines.get(tier.model)) for tier in ladder)


def model_folder(path: str) -> Path:
    """Return where a model's files lie: a folder, or a tier of the built-in ladder."""
    if path.startswith("builtin:tier"):
        from backends.builtin.paths import model_dir

        return model_dir(int(path.removeprefix("builtin:tier")))
    return Path(path).expanduser()


def size_in_words(num_params: int) -> str:
    """Return a number of parameters as models are named by, such as ``8.0B``."""
    millions = num_params / 1e6
    return f"{millions / 1000:.1f}B" if millions >= 1000 else f"{millions:.1f}M"


def _planned(name: str, model: str, models: Mapping[str, ModelConfig], engine: str | None) -> PlannedTier:
    config = models[model]
    if not isinstance(config, LocalModelConfig):
        return PlannedTier(name, model, f"{config.kind}:{model}", None)
    drafter = None
    if config.speculation.mode == "draft" and config.drafter is not None:
        named = models.get(config.drafter)
        path = named.path if isinstance(named, LocalModelConfig) else config.drafter
        drafter = footprint(read_shape(model_folder(path)), config.dtype)
    own = footprint(read_shape(model_folder(config.path)), config.dtype)
    return PlannedTier(name, model, config.path, own, drafter, config.context_length, engine)


def _normalised(shares: Sequence[float] | None, num_tiers: int) -> tuple[float, ...]:
    if shares is None:
        shares = TYPICAL_SHARES if num_tiers == len(TYPICAL_SHARES) else [1.0] * num_tiers
    if len(shares) != num_tiers or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares are {list(shares)}; expected {num_tiers} numbers above 0.")
    return tuple(share / sum(shares) for share in shares)


def _weights_once(tiers: Sequence[PlannedTier]) -> list[int]:
    loaded: set[str] = set()
    weights = []
    for tier in tiers:
        fresh = tier.footprint is not None and tier.checkpoint not in loaded
        weights.append(tier.footprint.weight_bytes if tier.footprint is not None and fresh else 0)
        loaded.add(tier.checkpoint)
    return weights


def _guaranteed_slabs(tier: PlannedTier, slab_bytes: int) -> int:
    """Return how many slabs one whole context takes; a drafter is guaranteed none."""
    if tier.footprint is None:
        return 0
    num_tokens = tier.context_length or tier.footprint.context_length
    return slabs_for(num_tokens, tier.footprint.kv_bytes_per_token, slab_bytes)


def _tier_plan(
    tier: PlannedTier,
    share: float,
    weight_bytes: int,
    kv_bytes: int,
    demand: float,
    context_tokens: int,
    slab_bytes: int,
    engine_of: str | None,
) -> TierPlan:
    per_token = tier.kv_bytes_per_token
    # Requests at once in the ratio of the shares: a tier's part of the memory is its part of the demand.
    own_bytes = int(kv_bytes * share * per_token / demand) if demand else 0
    num_tokens = own_bytes // per_token if per_token else 0
    return TierPlan(
        tier=tier,
        share=share,
        guaranteed_slabs=0 if engine_of else _guaranteed_slabs(tier, slab_bytes),
        weight_bytes=weight_bytes,
        kv_bytes=own_bytes,
        num_kv_tokens=num_tokens,
        concurrency=num_tokens // context_tokens,
        engine_of=engine_of,
    )


def _engine_of(tiers: Sequence[PlannedTier], index: int) -> str | None:
    """Return the earlier tier whose engine serves a tier too."""
    engine = tiers[index].engine
    return next((tier.name for tier in tiers[:index] if engine is not None and tier.engine == engine), None)
