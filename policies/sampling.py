"""Decides which answers are checked, and with what known probability.

A cheap answer may be drawn to be checked against the top tier (``up``), a dear one to see whether the tier below would
have done (``down``). The probability is fixed before the draw and kept with it, so that what is measured on the drawn
answers can be weighted back to all of them (Horvitz and Thompson 1952). Answers the router was least sure of are drawn
more often, and so are explored ones: they are where a check says most. Most often of all a
quarantined tier is asked about requests that its quarantine moved up (downward sampling): that teaches what the tier is
worth now, and no caller gets its answer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from policies.errors import InvalidPolicy
from policies.exploration import Uniform

Direction = Literal["up", "down"]

UNKNOWN = "unknown"
"""The stratum of answers without an estimate."""

FAULTY = "faulty"
"""The stratum of answers known to be of no use without a check: all of them are in the sample."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Says how answers are drawn for verification.

    Parameters
    ----------
    shares : tier number -> share of its answers to check against the top tier, 0..1; the others have `sampling_share`
    edges : borders between strata of confidence, P(as good as the top tier), rising, each within 0..1
    factors : what a share is multiplied with in each stratum, one more than there are edges; from least sure on
    explored_factor : what a share is multiplied with for answers that were explored
    down_share : share of answers above the cheapest tier to ask a lower tier as well, 0..1
    doubt_share : the same of answers that went up because a lower tier was quarantined or the prompt was novel; and of
        a share of what a router made after a drift sends to the top

    Raises
    ------
    InvalidPolicy
        A field outside its range; names it.
    """

    shares: Mapping[int, float] = field(default_factory=dict)
    edges: tuple[float, ...] = (0.9, 0.98)
    factors: tuple[float, ...] = (2.0, 1.0, 0.5)
    explored_factor: float = 10.0
    down_share: float = 0.01
    doubt_share: float = 0.9

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
        if not math.isfinite(self.explored_factor) or self.explored_factor < 0.0:
            raise InvalidPolicy("explored_factor", self.explored_factor, "a finite number, 0 or more")
        for name in ("down_share", "doubt_share"):
            if not _is_share(getattr(self, name)):
                raise InvalidPolicy(name, getattr(self, name), "a share from 0 to 1")

    def stratum(self, confidence: float | None) -> tuple[str, float]:
        """Return name and factor of the stratum that a confidence falls into."""
        if confidence is None or not math.isfinite(confidence):
            return UNKNOWN, 1.0
        place = bisect_right(self.edges, confidence)
        return _strata(self.edges)[place], self.factors[place]


class SampledAnswer(Struct, frozen=True):
    """Holds the facts that an answer's inclusion probabilities rest on.

    Parameters
    ----------
    tier : that answered
    confidence : P(as good as the top tier) of this answer
    is_explored : it was served by chance, not by choice
    downward_share : 1 when it went up because a lower tier was quarantined or the prompt was novel; between 0 and 1
        where its router was made after a drift and sends much to the top for want of knowledge
    """

    tier: int
    confidence: float | None
    is_explored: bool = False
    downward_share: float = 0.0


class InclusionProbabilities(Struct, frozen=True):
    """Holds an answer's probabilities of an upward check and of a downward one by tier; one at most happens.

    ``up_against`` is the tier it would be compared with; ``down`` has (tier, chance) of every lower tier.
    """

    stratum: str
    up: float = 0.0
    up_against: int | None = None
    down: tuple[tuple[int, float], ...] = ()

    @property
    def total_down(self) -> float:
        return sum([chance for _, chance in self.down])

    @property
    def total(self) -> float:
        return self.up + self.total_down

    def of_faulty(self) -> InclusionProbabilities:
        """Return what holds once an answer that could be drawn turns out to be faulty.

        Every faulty answer counts as checked, with probability 1, and the others as they are drawn: two strata, each
        with its own known probability, whose weights bring both back to all answers.
        """
        return InclusionProbabilities(FAULTY, 1.0, self.up_against) if self.up > 0.0 else self

    def certain(self) -> DrawnCheck:
        """Return the upward check of an answer that is not left to a draw."""
        assert self.up_against is not None, "a check needs a tier"
        return DrawnCheck("up", self.up_against, self.up, self.stratum)

    def permits(self, drawn: DrawnCheck) -> bool:
        """Return whether an earlier draw may be followed here too: whoever is asked may read this prompt."""
        if drawn.direction == "up":
            return self.up > 0.0 and self.up_against == drawn.against_tier
        return any(tier == drawn.against_tier for tier, _ in self.down)

    @property
    def logged(self) -> float:
        """Return the chance that stands on the answer's row: upward, or downward where there is no tier above."""
        return self.up if self.up_against is not None else self.total_down


class DrawnCheck(Struct, frozen=True):
    """An answer that is to be checked."""

    direction: Direction
    against_tier: int
    probability: float
    stratum: str


def inclusion_probabilities(
    sampling: Sampling,
    share: float,
    answered: SampledAnswer,
    prices: Mapping[int, float],
    *,
    factor: float = 1.0,
    throttle: float = 1.0,
    barred: frozenset[int] = frozenset(),
) -> InclusionProbabilities:
    """Return an answer's inclusion probabilities.

    Parameters
    ----------
    sampling, share : the policy's ``sampling`` and ``sampling_share``
    answered : whose answer, and how it came about
    prices : tier -> what its request costs, of the policy's tiers: no prompt is sent to one that it does not permit.
        Of a share of downward checks each lower tier has a part by one over the root of its price: for a given amount
        spent that knows all tiers about equally well (Neyman 1934). Without any price the parts are equal
    factor : multiplies the upward share, as for a canary router, whose answers are few and must be known soon
    throttle : 0..1, lowers every chance alike while checks are behind; known before the draw, so nothing is biased
    barred : tiers of the policy that this prompt must not be sent to. Against a barred top nothing can be checked: the
        chance is 0, since a lower one in its place would say something else
    """
    name, by_confidence = sampling.stratum(answered.confidence)
    tier = answered.tier
    top = max(prices, default=tier)
    below = sorted(other for other in prices if other < tier and other not in barred)
    up = 0.0
    if top > tier and top not in barred:
        factor *= by_confidence * (sampling.explored_factor if answered.is_explored else 1.0)
        up = min(sampling.shares.get(tier, share) * factor, 1.0) * throttle
    wanted = sampling.down_share + answered.downward_share * max(sampling.doubt_share - sampling.down_share, 0.0)
    down = min(wanted * throttle, 1.0 - up)
    return InclusionProbabilities(
        name, up, top if top > tier else None, tuple(zip(below, _parts(below, prices, down), strict=True))
    )


@lru_cache(64)
def _strata(edges: tuple[float, ...]) -> tuple[str, ...]:
    """Return the names of the strata between edges."""
    return tuple(f"{low:g}-{high:g}" for low, high in pairwise((0.0, *edges, 1.0)))


def _parts(tiers: Sequence[int], prices: Mapping[int, float], whole: float) -> list[float]:
    weights, total = _weights(tuple([prices[tier] for tier in tiers]))
    return [whole * each / total for each in weights]


@lru_cache(64)
def _weights(prices: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    """Return the weight of each price, and their sum."""
    dearest = max(prices, default=0.0)
    # A tier without a price of its own counts as a thousandth of the dearest: asked most, not always.
    weights = tuple(max(price, dearest / 1000.0) ** -0.5 if dearest > 0.0 else 1.0 for price in prices)
    return weights, sum(weights)


def draw_check(chosen: InclusionProbabilities, rng: Uniform) -> DrawnCheck | None:
    """Draw with exactly these probabilities, from one uniform number; from none where nothing can be drawn."""
    if chosen.total <= 0.0:
        return None
    left = rng.random()
    if left < chosen.up:
        assert chosen.up_against is not None, "a chance needs a tier"
        return DrawnCheck("up", chosen.up_against, chosen.up, chosen.stratum)
    left -= chosen.up
    for tier, chance in chosen.down:
        if left < chance:
            return DrawnCheck("down", tier, chance, chosen.stratum)
        left -= chance
    return None


def _is_share(value: float) -> bool:
    return math.isfinite(value) and 0.0 <= value <= 1.0
