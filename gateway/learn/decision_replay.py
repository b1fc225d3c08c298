"""Replays a router's decisions of logged requests by the rules that serve: probabilities, not guesses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from gateway.api.routing_preferences import overrides_of
from gateway.learn.learning_table import LearningTable
from policies.errors import PolicyError
from policies.ladder import Ladder
from policies.policy import Policy
from policies.routing_decision import decide
from policies.types import RequestFacts, TierEstimate

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimates:
    """A router's view of a table's rows: P(right), P(as good), float64 (n, T) each, and novelty, float64 (n,)."""

    right: Floats
    good: Floats
    novelty: Floats

    def take(self, rows: NDArray[np.int64]) -> Estimates:
        """Return some of the rows."""
        return Estimates(self.right[rows], self.good[rows], self.novelty[rows])


def decisions(
    table: LearningTable,
    estimates: Estimates,
    policies: Mapping[str, Policy],
    default: str,
    ladder: Ladder,
    quarantine: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> tuple[Floats, int]:
    """Probability of every tier, float64 (n, T), and how many rows no decision was possible for (their logged one).

    What the log does not keep (sessions, load, the asked length) is left out for every router alike.

    Parameters
    ----------
    table : rows
    estimates : of the router to be judged
    policies : by name, completed with what was derived with that router
    default : stands in for policies that are no more
    quarantine : policy's name -> quarantined tier under that router -> P(as good) it must reach
    """
    found, num_failed = np.zeros((len(table), len(ladder))), 0
    rng = random.Random(0)  # the probabilities do not depend on the draw
    for row in range(len(table)):
        policy = policies.get(table.policies[row], policies[default])
        try:
            decision = decide(_facts(table, estimates, row, quarantine.get(policy.name, {})), policy, ladder, rng)
        except PolicyError:
            found[row] = table.propensity[row]
            num_failed += 1
            continue
        for tier, chance in decision.propensities.items():
            found[row, tier - 1] = chance
    return found, num_failed


def _facts(table: LearningTable, estimates: Estimates, row: int, quarantine: Mapping[int, float]) -> RequestFacts:
    pairs = zip(estimates.right[row].tolist(), estimates.good[row].tolist(), strict=True)
    return RequestFacts(
        num_prompt_tokens=int(table.prompt_tokens[row]),
        max_tokens=None,
        estimates=tuple(TierEstimate(tier, right, good) for tier, (right, good) in enumerate(pairs, start=1)),
        overrides=overrides_of(table.overrides[row]),
        novelty=float(estimates.novelty[row]),
        quarantine=quarantine,
    )
