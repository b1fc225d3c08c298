"""Declares the nouns of a prediction: request in, calibrated sufficiency per tier out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from classifier.text import own_text


class RouterRequest(Struct, frozen=True):
    """Holds what the router reads: the conversation as (role, text) turns.

    ``history`` is per-tier success history for the tenant or session: tier -> (number right, number seen). ``tools``
    are the values of :data:`classifier.tool_features.TOOL_FEATURES`; empty for a request without tools.
    """

    turns: tuple[tuple[str, str], ...]
    history: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    tools: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """Return the last user turn, or all text where there is none."""
        return own_text(self.turns)


class TierSufficiency(Struct, frozen=True):
    """Holds calibrated P(right) and P(as good as the top tier) for one tier."""

    tier: int
    p_right: float
    p_as_good: float


class Sufficiency(Struct, frozen=True):
    """Holds one prediction per tier, the features it rests on, and how foreign the prompt looks (0 to 1)."""

    tiers: tuple[TierSufficiency, ...]
    features: Mapping[str, float]
    novelty: float = 0.0
    router_version: str = ""
    latency_s: float = 0.0


class Router(Protocol):
    """Predicts; an immutable, versioned artifact."""

    @property
    def version(self) -> str: ...

    @property
    def num_tiers(self) -> int: ...

    def predict(self, requests: Sequence[RouterRequest]) -> list[Sufficiency]: ...
