"""The numbers derived with a router, as they travel inside its artifact, and how a policy takes them.

One router serves policies of different floors, so it carries one entry a floor::

    {"confidence": 0.95, "exploration_share": 0.02, "max_novelty": 0.99,
     "floors": [{"floor": 0.95, "thresholds": {"1": 0.83, ...}, "quality_value_usd": "0.0123",
                 "expected": {"floor": {"cost_usd": ..., "quality_vs_top": ...}, "benefit": {...}}}, ...]}

A number that did not hold its floor on the labelled traffic is left out of its entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from policies.errors import InvalidPolicy
from policies.policy import Policy

DERIVED_FLOORS = (0.80, 0.85, 0.90, 0.92, 0.95, 0.96, 0.97, 0.975, 0.98, 0.99)


def apply_derived(policy: Policy, derived: Mapping[str, Any]) -> Policy:
    """Fill what a policy leaves open from the entry of the lowest floor that is not below its own.

    A policy with a higher floor, or one to be held with more confidence, than any entry gets no thresholds and no price
    of quality: its tiers must then each reach the floor itself, and by benefit all goes to the top.

    Raises
    ------
    InvalidPolicy
        The derived numbers are not of the form above.
    """
    try:
        max_novelty = derived.get("max_novelty")
        novelty = None if max_novelty is None else float(max_novelty)
        entries = [each for each in derived.get("floors", ()) if float(each["floor"]) >= policy.quality_floor - 1e-9]
        if not entries or float(derived["confidence"]) < policy.confidence - 1e-9:
            return policy.with_derived(max_novelty=novelty)
        entry = min(entries, key=lambda each: float(each["floor"]))
        thresholds = {int(tier): float(level) for tier, level in entry.get("thresholds", {}).items()}
        value = entry.get("quality_value_usd")
        value_usd = None if value is None else Decimal(str(value))
    except (AttributeError, KeyError, TypeError, ValueError, InvalidOperation) as error:
        raise InvalidPolicy(
            "derived", f"{type(error).__name__}: {error}", "numbers as a router carries them"
        ) from error
    return policy.with_derived(thresholds=thresholds, quality_value_usd=value_usd, max_novelty=novelty)


def derive_for_floors(
    traffic: Any,
    *,
    floors: Sequence[float] = DERIVED_FLOORS,
    confidence: float = 0.95,
    exploration_share: float = 0.02,
    max_novelty: float | None = None,
) -> dict[str, Any]:
    """Derive the numbers of every floor, in the form an artifact carries.

    Parameters
    ----------
    traffic : :class:`policies.labelled_traffic.LabelledTraffic`, estimates made without having seen its labels
    exploration_share : of the traffic the floors are to hold for
    """
    # Only those who derive need numpy; those who apply do not.
    from policies.thresholds import Requirement, candidate_thresholds, derive_quality_value, derive_thresholds

    candidates = candidate_thresholds(traffic)
    entries: list[dict[str, Any]] = []
    for floor in floors:
        required = Requirement(floor, confidence, exploration_share)
        by_threshold = derive_thresholds(traffic, required, candidates)
        by_value = derive_quality_value(traffic, required)
        entry: dict[str, Any] = {"floor": floor, "expected": {}}
        if by_threshold.performance.holds:
            entry["thresholds"] = {str(tier): round(level, 6) for tier, level in by_threshold.thresholds.items()}
            entry["expected"]["floor"] = _expected(by_threshold.performance)
        if by_value.performance.holds:
            entry["quality_value_usd"] = str(by_value.quality_value_usd)
            entry["expected"]["benefit"] = _expected(by_value.performance)
        entries.append(entry)
    return {
        "confidence": confidence,
        "exploration_share": exploration_share,
        "max_novelty": max_novelty,
        "floors": entries,
    }


def _expected(found: Any) -> dict[str, Any]:
    return {
        "cost_usd": found.cost_usd,
        "quality_vs_top": found.quality_vs_top if math.isfinite(found.quality_vs_top) else None,
        "shares": list(found.shares),
    }
