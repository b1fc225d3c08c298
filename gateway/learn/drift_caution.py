"""Caution after a drift: a new router asks more of cheap answers than is derived, and gives that up as evidence comes.

Hundreds of labels are few for deriving a price of quality: of all the prices tried the one that seems cheapest is the
luckiest. So the earlier router's price stays (what changed is what the tiers are worth, not what quality is), and a
candidate is judged with a multiple of it: with much caution first, and with less as long as it is judged better.

A router made after a drift sends much to the top tier because it knows little. For a while that traffic is sampled
downward (:func:`gateway.control.router_set.downward_sampling_share`), and later retrains are judged on all rows since
the drift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import numpy as np

from classifier.artifact import RouterArtifact
from classifier.router import ArtifactRouter
from gateway.learn.candidate import Candidate
from gateway.learn.candidate_evaluation import RouterComparison, RouterContender
from gateway.learn.learning_table import LearningTable
from policies.policy import Policy

CHAINS = ((8.0, 5.6, 4.0), (2.8, 2.0, 1.4, 1.0, 0.7, 0.5))
# Of labels since the drift; with so many those from before it teach more of what is no more than of what is.
_ENOUGH_LABELS = 300

Complete = Callable[[ArtifactRouter], Mapping[str, Policy]]
"""Completes the active policies with what a router carries."""


@dataclass(frozen=True, slots=True)
class JudgedCandidate:
    """A candidate with some caution, and how it was judged."""

    candidate: Candidate
    contender: RouterContender
    comparison: RouterComparison


def least_cautious(
    candidate: Candidate,
    contender: RouterContender,
    judged: Callable[[RouterContender], RouterComparison],
    complete: Complete,
    prices: Mapping[str, Any],
    since: datetime,
    chains: Sequence[Sequence[float]] = CHAINS,
) -> JudgedCandidate:
    """Return the candidate, with as little caution as is judged better; with the most of it where nothing is.

    Each chain is judged from its most caution on and ends with the first that fails: of a sequence fixed beforehand
    only one test can err, so each chain has its part of the error (Angelopoulos et al. 2021, "Learn then Test",
    section 3). Where drift took little, much caution saves too little to be shown better; where it took much, little
    caution cannot be shown to hold the floor: hence more than one.

    Parameters
    ----------
    contender : the candidate's estimates of the rows to be judged on; its policies do not matter
    judged : compares with the serving router, with a chain's part of the error
    prices : the numbers that caution multiplies, in the form an artifact carries
    since : begin of what is judged on, aware
    """
    found: JudgedCandidate | None = None
    for chain in chains:
        for factor in chain:
            artifact = candidate.artifact.with_metadata(
                decision=cautious(prices, factor), prices=prices, caution=factor, drift_at=since.isoformat()
            )
            ours = replace(contender, policies=complete(ArtifactRouter(artifact)))
            comparison = judged(ours)
            if found is None or comparison.is_better:
                found = JudgedCandidate(replace(candidate, artifact=artifact), ours, comparison)
            if not comparison.is_better:
                break
    assert found is not None, "there is at least one factor"
    return found


def confidence_per_chain(confidence: float, chains: Sequence[Sequence[float]] = CHAINS) -> float:
    """Return the confidence each chain is judged with, so that all of them together keep to the stated one."""
    return 1.0 - (1.0 - confidence) / len(chains)


def cautious(derived: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the same numbers, asking more of every answer below the top.

    Parameters
    ----------
    derived : as an artifact carries it
    factor : quality is worth so many times as much, and thresholds leave so many times less doubt; less than 1 for more
    """

    def stricter(entry: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(entry)
        if (thresholds := entry.get("thresholds")) is not None:
            found["thresholds"] = {
                tier: round(max(1.0 - (1.0 - float(at)) / factor, 0.0), 6) for tier, at in thresholds.items()
            }
        if (value := entry.get("quality_value_usd")) is not None:
            found["quality_value_usd"] = str(Decimal(str(value)) * Decimal(repr(factor)))
        return found

    return {**derived, "floors": [stricter(entry) for entry in derived.get("floors", ())]}


def inherited_prices(derived: Mapping[str, Any], serving: RouterArtifact) -> dict[str, Any]:
    """Return the serving router's numbers without its caution; those of a floor that it has none for, as derived."""
    before = serving.metadata.get("prices") or serving.metadata.get("decision", {})
    known = {round(float(entry["floor"]), 4): entry for entry in before.get("floors", ())}

    def kept(entry: Mapping[str, Any]) -> dict[str, Any]:
        earlier = known.get(round(float(entry["floor"]), 4), {})
        names = [name for name in ("thresholds", "quality_value_usd") if earlier.get(name) is not None]
        return {**entry, **{name: earlier[name] for name in names}, "inherited": names, "expected": {}}

    return {**derived, "floors": [kept(entry) for entry in derived.get("floors", ())]}


def without_stale(table: LearningTable, since: datetime) -> LearningTable:
    """Return rows since a drift alone, where they carry enough labels; else all of them."""
    is_new = table.created_s >= since.timestamp()
    num_labels = int((~np.isnan(table.labels[is_new])).sum())
    return table.take(np.flatnonzero(is_new)) if num_labels >= _ENOUGH_LABELS else table
