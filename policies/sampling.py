"""Which answers are to be checked, and with what known probability.

A cheap answer may be drawn to be checked against the top tier (``up``), a dear one to see whether the tier below would
have done (``down``). The probability is fixed before the draw and kept with it, so that what is measured on the drawn
answers can be weighted back to all of them (Horvitz and Thompson 1952). Answers the router was least sure of are drawn
more often: they are where a check says most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from policies.errors import InvalidPolicy
from policies.exploration import Uniform

Direction = Literal["up", "down"]

UNKNOWN = "unknown"
"""The stratum of answers without an estimate."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn for verification.

    Parameters
    ----------
    shares : tier number -> share of its answers to check against the top tier, 0..1; the others have `sampling_share`
    edges : borders between strata of confidence, P(as good as the top tier), rising, each within 0..1
    factors : what a share is multiplied with in each stratum, one more than there are edges; from least sure on
    down_share : share of answers above the cheapest tier to ask the next lower tier as well, 0..1

    Raises
    ------
    InvalidPolicy
        A field outside its range; names it.
    """

    shares: Mapping[int, float] = field(default_factory=dict)
    edges: tuple[float, ...] = (0.9, 0.98)
    factors: tuple[float, ...] = (2.0, 1.0, 0.5)
    down_share: float = 0.01

    def __post_init__(self) -> None:
        for tier, share in self.shares.items():
            if not _is_share(share):
                raise InvalidPolicy(f"shares.{tier}", share, "a share from 0 to 1")
        if list(self.edges) != sorted(set(self.edges)) or not all(0.0 < edge < 1.0 for edge in self.edges):
            raise InvalidPolicy("edges", self.edges, "rising probabilities between 0 and 1")
        if len(self.factors) != len(self.edges) + 1:
            raise InvalidPolicy("factors", self.factors, f"{len(self.edges) + 1} numbers, one more than edges")
        if not all(math.isfinite(factor) and factor >= 0.0 for factor in self.factors):
            raise InvalidPolicy("factors", self.factors, "finite numbers, 0 or more")
        if not _is_share(self.down_share):
            raise InvalidPolicy("down_share", self.down_share, "a share from 0 to 1")

    def stratum(self, confidence: float | None) -> tuple[str, float]:
        """Name and factor of the stratum that a confidence falls into."""
        if confidence is None or not math.isfinite(confidence):
            return UNKNOWN, 1.0
        place = bisect_right(self.edges, confidence)
        low = self.edges[place - 1] if place else 0.0
        high = self.edges[place] if place < len(self.edges) else 1.0
        return f"{low:g}-{high:g}", self.factors[place]


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely an answer is to be drawn, in each direction; at most one of the two happens.

    ``up_against`` and ``down_against`` are the tiers it would be compared with.
    """

    stratum: str
    up: float = 0.0
    up_against: int | None = None
    down: float = 0.0
    down_against: int | None = None

    @property
    def any(self) -> float:
        return self.up + self.down

    @property
    def logged(self) -> float:
        """The chance that stands on the answer's row: upward, or downward where there is no tier above."""
        return self.up if self.up_against is not None else self.down


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer that is to be checked."""

    direction: Direction
    against_tier: int
    probability: float
    stratum: str


def chances(
    sampling: Sampling,
    share: float,
    tier: int,
    permitted: Sequence[int],
    confidence: float | None,
    throttle: float = 1.0,
) -> Chances:
    """How likely an answer is to be drawn.

    Parameters
    ----------
    sampling, share : the policy's ``sampling`` and ``sampling_share``
    tier : that answered
    permitted : the policy's tiers, rising: no prompt is sent to a tier that its policy does not permit
    confidence : P(as good as the top tier) of this answer
    throttle : 0..1, lowers every chance alike while checks are behind; known before the draw, so nothing is biased
    """
    name, factor = sampling.stratum(confidence)
    above = [other for other in permitted if other > tier]
    below = [other for other in permitted if other < tier]
    up = min(sampling.shares.get(tier, share) * factor, 1.0) * throttle if above else 0.0
    down = min(sampling.down_share * throttle, 1.0 - up) if below else 0.0
    return Chances(
        name,
        up,
        above[-1] if above else None,
        down,
        below[-1] if below else None,
    )


def draw(chosen: Chances, rng: Uniform) -> Drawn | None:
    """Draw with exactly these probabilities, from one uniform number; from none where nothing can be drawn."""
    if chosen.any <= 0.0:
        return None
    u = rng.random()
    if u < chosen.up:
        assert chosen.up_against is not None, "a chance needs a tier"
        return Drawn("up", chosen.up_against, chosen.up, chosen.stratum)
    if u < chosen.any:
        assert chosen.down_against is not None, "a chance needs a tier"
        return Drawn("down", chosen.down_against, chosen.down, chosen.stratum)
    return None


def _is_share(value: float) -> bool:
    return math.isfinite(value) and 0.0 <= value <= 1.0
