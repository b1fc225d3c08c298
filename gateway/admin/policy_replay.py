"""Replays the log by a policy before it is saved: where requests would go, at what cost, and how good.

Costs are those of the same tokens at the other tier's prices. Quality is P(as good as the top tier), estimated from
checked answers by :mod:`policies.offpolicy`: it needs tiers that the log has tried, and says so where it has not.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.admin.decision_replay import facts_of, has_its_estimates, replay
from gateway.models.catalog import Catalog
from gateway.store.records import RequestRecord
from policies.errors import PolicyError
from policies.intervals import Estimate, skewed_interval
from policies.offpolicy import LoggedRows, doubly_robust, self_normalised
from policies.policy import Policy
from policies.pricing import price_usd

_EXAMPLES = 5
_CONFIDENCE = 0.95
# Fewer checked answers than this say nothing worth an interval.
_LEAST_GRADED = 30
# The clock is looked at this often.
_LOOK_EVERY = 10


@dataclass(slots=True)
class ReplayTally:
    """Counts what has been replayed so far."""

    num_rows: int = 0
    num_moved: int = 0
    num_refused: int = 0
    num_without_estimates: int = 0
    tiers: Counter[int] = field(default_factory=Counter)
    logged_tiers: Counter[int] = field(default_factory=Counter)
    shares: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    moves: Counter[tuple[int, int]] = field(default_factory=Counter)
    examples: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    costs_usd: list[float] = field(default_factory=list)
    logged_costs_usd: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    graded: list[GradedRow] = field(default_factory=list)
    num_unsupported: int = 0


@dataclass(frozen=True, slots=True)
class GradedRow:
    """Holds one row with a known outcome, as :class:`policies.offpolicy.LoggedRows` wants it, by tier."""

    chosen: int
    logged: tuple[float, ...]
    target: tuple[float, ...]
    predicted: tuple[float, ...]
    outcome: float
    weight: float


@dataclass(slots=True)
class FollowingSteps:
    """Holds what the further steps of a turn took, at each tier, and what was found of them."""

    costs_usd: Counter[int] = field(default_factory=Counter)
    logged_usd: float = 0.0
    verdicts: list[tuple[float, float]] = field(default_factory=list)


class PolicyReplay:
    """Replays logged turns by one policy and sums up what came of it; nearly all are of one request.

    Further steps of a turn follow its decision, whatever it is. They come before it: the newest rows come first.

    Parameters
    ----------
    policy : completed with what was derived for the active router
    catalog : the ladder and the names requests may have asked for
    until_s : of ``clock``; rows after it are left out
    """

    def __init__(
        self, policy: Policy, catalog: Catalog, until_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._catalog = catalog
        self._until_s = until_s
        self._clock = clock
        self.tally = ReplayTally()
        self._steps: dict[str, FollowingSteps] = {}

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._clock() >= self._until_s

    def add(self, records: Sequence[RequestRecord], verdicts: Mapping[str, tuple[float, float]]) -> bool:
        """Replay some rows; ``verdicts`` is request id -> (P(good), inclusion probability). False when time is up."""
        for place, record in enumerate(records):
            if place % _LOOK_EVERY == 0 and self.is_over():
                return False
            if record.turn_id is not None:
                self._add_step(record, record.turn_id, verdicts.get(record.request_id))
            elif not has_its_estimates(record):
                self.tally.num_without_estimates += 1
            elif record.decided_tier is not None and record.final_tier is not None and record.error_code is None:
                self._add(record, verdicts.get(record.request_id))
        return True

    def _add_step(self, record: RequestRecord, turn_id: str, verdict: tuple[float, float] | None) -> None:
        steps = self._steps.setdefault(turn_id, FollowingSteps())
        steps.costs_usd.update(self._prices(record))
        steps.logged_usd += float(record.cost_usd)
        if verdict is not None:
            steps.verdicts.append(verdict)

    def _add(self, record: RequestRecord, verdict: tuple[float, float] | None) -> None:
        tally, ladder = self.tally, self._catalog.ladder
        assert record.decided_tier is not None, "only decided rows are added"
        tally.num_rows += 1
        tally.logged_tiers[record.decided_tier] += 1
        try:
            again = replay(facts_of(record, self._catalog), self._policy, ladder)
        except PolicyError:
            tally.num_refused += 1
            return
        chosen = again.decision.tier
        tally.tiers[chosen] += 1
        for tier, chance in again.propensities.items():
            tally.shares[tier] += chance
        logged = _unexplored(record)
        if chosen != logged:
            tally.num_moved += 1
            tally.moves[logged, chosen] += 1
            if len(tally.examples[logged, chosen]) < _EXAMPLES:
                tally.examples[logged, chosen].append(record.request_id)
        steps = self._steps.pop(record.request_id, None)
        self._add_cost(record, again.propensities, steps)
        if steps is not None:
            verdict = _verdict_of_turn([*steps.verdicts, *([] if verdict is None else [verdict])])
        self._add_quality(record, again.propensities, verdict)

    def _prices(self, record: RequestRecord) -> dict[int, float]:
        """Return what the same tokens cost at each tier."""
        return {
            tier.index: float(
                price_usd(tier, record.prompt_tokens, record.completion_tokens, record.cached_tokens)
                + tier.price_per_request_usd * (record.num_choices - 1)
            )
            for tier in self._catalog.ladder
        }

    def _add_cost(self, record: RequestRecord, target: Mapping[int, float], steps: FollowingSteps | None) -> None:
        prices, logged_usd = self._prices(record), float(record.cost_usd)
        if steps is not None:
            prices = {tier: price + steps.costs_usd[tier] for tier, price in prices.items()}
            logged_usd += steps.logged_usd
        self.tally.costs_usd.append(sum(chance * prices[tier] for tier, chance in target.items()))
        self.tally.logged_costs_usd.append(logged_usd)

    def _add_quality(
        self, record: RequestRecord, target: Mapping[int, float], verdict: tuple[float, float] | None
    ) -> None:
        tally, indexes = self.tally, [tier.index for tier in self._catalog.ladder]
        top = indexes[-1]
        estimates = {each.tier: each.p_as_good for each in record.sufficiency} | {top: 1.0}
        if all(tier in estimates for tier in target):
            tally.predicted.append(sum(chance * estimates[tier] for tier, chance in target.items()))
        if record.final_tier is None or record.final_tier != record.decided_tier:
            # Who answered was not drawn by these propensities.
            return
        if record.final_tier == top:
            outcome, weight = 1.0, 1.0
        elif verdict is not None:
            outcome, weight = verdict[0], 1.0 / verdict[1]
        else:
            return
        logged = record.propensities
        if any(chance > 0 and logged.get(tier, 0.0) <= 0 for tier, chance in target.items()):
            tally.num_unsupported += 1
            return
        tally.graded.append(
            GradedRow(
                chosen=indexes.index(record.final_tier),
                logged=tuple(logged.get(index, 0.0) for index in indexes),
                target=tuple(target.get(index, 0.0) for index in indexes),
                predicted=tuple(estimates.get(index, 0.0) for index in indexes),
                outcome=outcome,
                weight=weight,
            )
        )

    def report(self) -> dict[str, Any]:
        """Return what the replay found."""
        tally = self.tally
        num_decided = tally.num_rows - tally.num_refused
        return {
            "num_rows": tally.num_rows,
            "num_refused": tally.num_refused,
            "num_without_estimates": tally.num_without_estimates,
            "tiers": [
                {
                    "tier": tier.index,
                    "name": tier.name,
                    "logged_share": _share(tally.logged_tiers[tier.index], tally.num_rows),
                    "share": _share(tally.shares.get(tier.index, 0.0), num_decided),
                    "share_without_exploration": _share(tally.tiers[tier.index], num_decided),
                }
                for tier in self._catalog.ladder
            ],
            "moved": {
                "num_requests": tally.num_moved,
                "share": _share(tally.num_moved, num_decided),
                "moves": [
                    {"from": source, "to": target, "num_requests": count, "examples": tally.examples[source, target]}
                    for (source, target), count in tally.moves.most_common()
                ],
            },
            "cost": self._cost(),
            "quality": self._quality(),
        }

    def _cost(self) -> dict[str, Any] | None:
        costs, logged = np.asarray(self.tally.costs_usd), np.asarray(self.tally.logged_costs_usd)
        if len(costs) < 2:
            return None
        return {
            "logged_usd": float(logged.sum()),
            "expected_usd": float(costs.sum()),
            "per_request_usd": float(costs.mean()),
            "change_per_request_usd": _interval(skewed_interval(costs - logged, _CONFIDENCE)),
        }

    def _quality(self) -> dict[str, Any]:
        tally = self.tally
        num_graded = len(tally.graded)
        found: dict[str, Any] = {
            "meaning": "P(as good as the top tier), mean over requests",
            "num_graded": num_graded,
            "num_unsupported": tally.num_unsupported,
            "predicted": float(np.mean(tally.predicted)) if tally.predicted else None,
            "estimate": None,
        }
        if num_graded < _LEAST_GRADED:
            found["note"] = f"Insufficient evidence: {num_graded} checked answers; {_LEAST_GRADED} are needed."
            return found
        logged, target = _logged_rows(tally.graded)
        with_model = doubly_robust(logged, target)
        found["estimate"] = _interval(with_model.estimate) | {
            "method": "doubly_robust",
            "effective_rows": with_model.effective_rows,
        }
        found["self_normalised"] = _interval(self_normalised(logged, target).estimate)
        if tally.num_unsupported:
            found["note"] = (
                f"{tally.num_unsupported} checked answers are left out: the policy would use tiers for them that the "
                "log never tries. The estimate is for the others."
            )
        return found


def _verdict_of_turn(verdicts: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the mean of what was drawn of a turn, with its one probability; None where nothing was checked.

    What is known without a draw (probability 1) counts only where nothing was drawn.
    """
    if not verdicts:
        return None
    inclusion = min(chance for _, chance in verdicts)
    return float(np.mean([p_good for p_good, chance in verdicts if chance == inclusion])), inclusion


def _logged_rows(graded: Sequence[GradedRow]) -> tuple[LoggedRows, Any]:
    rows = LoggedRows(
        chosen=np.asarray([each.chosen for each in graded], dtype=np.int64),
        propensity=np.asarray([each.logged for each in graded]),
        outcome=np.asarray([each.outcome for each in graded]),
        predicted=np.asarray([each.predicted for each in graded]),
        weights=np.asarray([each.weight for each in graded]),
    )
    return rows, np.asarray([each.target for each in graded])


def _unexplored(record: RequestRecord) -> int:
    """Return the tier the logged policy would have chosen without the dice."""
    assert record.decided_tier is not None
    if record.explored and record.propensities:
        return max(record.propensities, key=lambda tier: record.propensities[tier])
    return record.decided_tier


def _interval(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "confidence": _CONFIDENCE}


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
