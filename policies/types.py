"""The nouns of a routing decision. Pure data: no I/O, no clock, no randomness.

What every request makes anew is a msgspec structure: a frozen dataclass of that many fields takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from msgspec import Struct, field

from policies.escalation import Rung
from policies.turn_lock import TurnLock


class ThresholdMode(StrEnum):
    """Says how a policy turns estimates into a tier: by the floor on quality, or by a price put on quality."""

    FLOOR = "floor"
    BENEFIT = "benefit"


class ReasonCode(StrEnum):
    """Why a tier was chosen; the first that applies, sent as ``x-suffice-reason``."""

    PINNED = "pinned"
    ONLY_ALLOWED = "only_allowed"
    LOCKED = "locked"
    UNLOCKED = "unlocked"
    STICKY = "sticky"
    EXPLORED = "explored"
    SUFFICIENT = "sufficient"
    BENEFIT = "benefit"
    NONE_SUFFICES = "none_suffices"
    NO_ESTIMATE = "no_estimate"
    CONTEXT = "context"
    OVERLOAD = "overload"
    FALLBACK = "fallback"
    ESCALATED = "escalated"
    RESUMED = "resumed"
    KILL_SWITCH = "kill_switch"
    NOVEL = "novel"
    QUARANTINED = "tightened"


@dataclass(frozen=True, slots=True)
class Tier:
    """One rung of the ladder.

    Parameters
    ----------
    index : its place; 1 is the cheapest
    name : what callers and policies call it
    model : the served model behind it, a name under `[models]`
    price_per_request_usd : price of an answer, however long
    price_per_input_token_usd : price of a prompt token, on top
    price_per_cached_token_usd : price of a prompt token that its model had in its cache, at most that of any other; by
        default the same
    price_per_output_token_usd : price of a token of the answer, on top
    price_per_compute_hour_usd : price of an hour of the device, for the cost by measured seconds
    context_length : most tokens of prompt and answer; by default the model's own
    region : where its model runs, as policies name it; without one it is in no region
    """

    index: int
    name: str
    model: str
    price_per_request_usd: Decimal = Decimal(0)
    price_per_input_token_usd: Decimal = Decimal(0)
    price_per_cached_token_usd: Decimal | None = None
    price_per_output_token_usd: Decimal = Decimal(0)
    price_per_compute_hour_usd: Decimal = Decimal(0)
    context_length: int | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Permissions:
    """Says what a caller's key lets its requests use: policies, tiers and regions by name; any of a kind when empty.

    A name that nothing has permits nothing: what a key was bound to may be gone, and must not open the rest.
    """

    allowed_policies: tuple[str, ...] = ()
    allowed_tiers: tuple[str, ...] = ()
    allowed_regions: tuple[str, ...] = ()

    def permits_policy(self, name: str) -> bool:
        """Return whether a request may be decided by a policy."""
        return not self.allowed_policies or name in self.allowed_policies

    def permits(self, tier: Tier) -> bool:
        """Return whether a prompt may be sent to a tier."""
        is_named = not self.allowed_tiers or tier.name in self.allowed_tiers
        return is_named and (not self.allowed_regions or tier.region in self.allowed_regions)


EVERYTHING = Permissions()


class TierEstimate(Struct, frozen=True):
    """Calibrated P(right) and P(as good as the top tier) for one tier."""

    tier: int
    p_right: float
    p_as_good: float


@dataclass(frozen=True, slots=True)
class Overrides:
    """Holds what one request may ask for (body ``suffice`` object or headers).

    ``regions`` and ``max_cost_usd`` only ever narrow what its policy says of the same; none when empty and None.
    ``permissions`` are its key's: it may ask for nothing else.
    """

    tier: int | None = None
    min_tier: int | None = None
    max_tier: int | None = None
    explore: bool = True
    session_id: str | None = None
    regions: tuple[str, ...] = ()
    max_cost_usd: Decimal | None = None
    permissions: Permissions = EVERYTHING


@dataclass(frozen=True, slots=True)
class SessionState:
    """The tier that served a conversation last and the tokens its KV cache may still hold."""

    tier: int
    cached_tokens: int


class RequestFacts(Struct, frozen=True):
    """Everything a decision may rest on.

    ``unable`` are tiers whose model lacks what the request needs, ``unavailable`` those that are down or full now.
    ``novelty`` is how foreign the prompt looks to
    the router, 0 familiar to 1 foreign. ``quarantine`` are quarantined tiers, with the P(as good) they
    must reach until it is shown again; above 1 for none. ``guessed_prompt_tokens`` stand for the count in prices where
    there is none. ``num_answers`` is how many answers are asked for, each to a prompt of that length at most.
    ``lock`` is the turn that a step of a tool loop belongs to.
    ``is_prompt_counted`` is False where the prompt has ``num_prompt_tokens`` at least.
    """

    num_prompt_tokens: int | None
    max_tokens: int | None
    estimates: tuple[TierEstimate, ...]
    overrides: Overrides = Overrides()
    session: SessionState | None = None
    unavailable: frozenset[int] = frozenset()
    unable: frozenset[int] = frozenset()
    expected_wait_s: Mapping[int, float] = field(default_factory=dict)
    kill_switch: bool = False
    novelty: float = 0.0
    quarantine: Mapping[int, float] = field(default_factory=dict)
    guessed_prompt_tokens: int = 0
    num_answers: int = 1
    is_prompt_counted: bool = True
    lock: TurnLock | None = None


class BarReason(StrEnum):
    """Why a limit of policy, request or key keeps a tier from a request."""

    REGION = "region"
    COST = "cost"
    KEY = "key"


class RoutingDecision(Struct, frozen=True):
    """The choice, with what is needed to explain and replay it.

    ``propensity`` is the probability with which *this* tier was chosen given the facts; ``propensities`` the whole
    distribution (tier -> probability, summing to 1). ``ladder`` is the fallback order after ``tier``.
    ``escalation_path`` says of each tier that may answer below which confidence its answer goes up, and where to.
    ``barred`` are the tiers that a limit on regions or cost, or the caller's key, keeps from it.
    """

    tier: int
    ladder: tuple[int, ...]
    propensity: float
    propensities: Mapping[int, float]
    reason: ReasonCode
    explored: bool
    confidence: float | None
    detail: str = ""
    escalation_path: tuple[Rung, ...] = ()
    barred: Mapping[int, BarReason] = field(default_factory=dict)
