"""Whether a candidate is better than the serving router, from the log alone.

Both routers' decisions are replayed on the same held-out requests. A request's worth at each tier is what was seen of
it, weighed by the inverse of the chance of seeing it, over the routers' own guesses (doubly robust); inverse propensity
and self-normalised estimates from graded answers alone stand beside it. The candidate is promoted when the lower bound
of its advantage says so, and never otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.learn.decision_replay import Estimates, decisions
from gateway.learn.errors import NothingToLearn
from gateway.learn.learning_table import LabelOrigin, LearningTable
from gateway.learn.threshold_derivation import tier_costs_usd
from policies.intervals import Estimate
from policies.ladder import Ladder
from policies.offpolicy import LoggedRows, OffPolicyEstimate, doubly_robust, inverse_propensity, self_normalised
from policies.policy import Policy
from policies.promotion import Judgement, PromotionRule, PromotionVerdict, judge_promotion

Floats = NDArray[np.float64]

MIN_ROWS = 30
MIN_CHECKED = 20
MAX_UNSUPPORTED = 0.05


@dataclass(frozen=True, slots=True)
class RouterContender:
    """A router as it is judged: its estimates of the rows, the policies it completes, and its quarantined tiers.

    ``quarantine``: policy's name -> tier -> P(as good) it must reach. ``decided``: its decisions of the rows, where
    they are known already.
    """

    estimates: Estimates
    policies: Mapping[str, Policy]
    quarantine: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    decided: tuple[Floats, int] | None = None

    def decisions(self, table: LearningTable, ladder: Ladder, default: str) -> tuple[Floats, int]:
        """See :func:`gateway.learn.decision_replay.decisions`."""
        return self.decided or decisions(table, self.estimates, self.policies, default, ladder, self.quarantine)

    def decided_by(self, table: LearningTable, ladder: Ladder, default: str) -> RouterContender:
        """Return the same with its decisions, for several comparisons on the same rows."""
        return replace(self, decided=self.decisions(table, ladder, default))

    def take(self, rows: NDArray[np.int64]) -> RouterContender:
        """On some of the rows."""
        decided = None if self.decided is None else (self.decided[0][rows], self.decided[1])
        return replace(self, estimates=self.estimates.take(rows), decided=decided)


@dataclass(frozen=True, slots=True)
class RouterComparison:
    """The judgement, and everything behind it as JSON."""

    judgement: Judgement
    body: dict[str, Any]

    @property
    def is_better(self) -> bool:
        return self.judgement.verdict is PromotionVerdict.PROMOTE


def compare(
    table: LearningTable,
    candidate: RouterContender,
    serving: RouterContender,
    ladder: Ladder,
    default: str,
    rule: PromotionRule,
) -> RouterComparison:
    """Judge a candidate on rows that neither router was fitted on.

    Quality above the policy's floor is there to be saved: a candidate that is beyond doubt not below the floor may give
    up more of the serving router's than ``rule.max_quality_loss``, as long as it is worth more altogether. The serving
    router is taken as it serves, with what doubt has moved up.

    Parameters
    ----------
    table : held-out rows of the log
    default : name of the policy for rows whose own is no more
    rule : what counts as better

    Raises
    ------
    NothingToLearn
        Too few rows, or too few of them checked.
    """
    kept = np.flatnonzero(table.sampling_weight > 0)
    table, contenders = table.take(kept), {"candidate": candidate.take(kept), "serving": serving.take(kept)}
    _need_rows(table)
    replayed = {name: each.decisions(table, ladder, default) for name, each in contenders.items()}
    num_undecided = max(num for _, num in replayed.values())
    chances = {name: chance for name, (chance, _) in replayed.items()}
    support = _support(table)
    usable = np.flatnonzero(~np.any([((each > 0) & ~support).any(axis=1) for each in chances.values()], axis=0))
    num_unsupported = len(table) - len(usable)
    if len(usable) < MIN_ROWS or num_unsupported > MAX_UNSUPPORTED * len(table):
        return _cannot_tell(num_unsupported, len(table))
    guess = (candidate.estimates.good + serving.estimates.good)[kept][usable] / 2
    table, support = table.take(usable), support[usable]
    chances = {name: each[usable] for name, each in chances.items()}
    quality, cost = _quality_rows(table, guess, support), _cost_rows(table, ladder, support)
    held = doubly_robust(quality, chances["candidate"], 2 * rule.confidence - 1).estimate
    floor = candidate.policies[default].quality_floor
    is_held, rule = within_floor(held, floor, rule)
    judgement = judge_promotion(quality, cost, chances["candidate"], chances["serving"], rule)
    body = {
        **_stated(judgement, rule),
        "floor": {"floor": floor, "is_held": is_held, "quality": held.value, "quality_low": held.low},
        **_counts(table, chances),
        "num_unsupported": num_unsupported,
        "num_undecided": num_undecided,
        **{name: _worth(table, quality, cost, each) for name, each in chances.items()},
    }
    return RouterComparison(judgement, body)


def within_floor(held: Estimate, floor: float, rule: PromotionRule) -> tuple[bool, PromotionRule]:
    """Return whether a candidate is certified to hold the floor, and the rule by which it is judged then.

    Parameters
    ----------
    held : its quality, with the rule's confidence
    """
    is_held = held.low >= floor
    return is_held, replace(rule, max_quality_loss=1.0) if is_held else rule


def _stated(judgement: Judgement, rule: PromotionRule) -> dict[str, Any]:
    """Return the verdict, and the numbers and the rule behind it."""
    numbers = asdict(judgement)
    verdict, reason = numbers.pop("verdict"), numbers.pop("reason")
    return {"verdict": verdict.value, "reason": reason, "judgement": numbers, "rule": asdict(rule)}


def _counts(table: LearningTable, chances: Mapping[str, Floats]) -> dict[str, Any]:
    """Return how much was judged on, and the share of traffic that the candidate would move."""
    moved = np.abs(chances["candidate"] - chances["serving"]).sum(axis=1) / 2
    return {
        "num_requests": float(table.sampling_weight.sum()),
        "num_rows": len(table),
        "num_checked": int(table.is_checked.sum()),
        "share_moved": float(np.average(moved, weights=table.sampling_weight)),
    }


def _worth(table: LearningTable, quality: LoggedRows, cost: LoggedRows, chance: Floats) -> dict[str, Any]:
    """One router's shares of the tiers, quality and cost."""
    return {
        "shares": np.average(chance, axis=0, weights=table.sampling_weight).tolist(),
        "quality": _estimates(doubly_robust(quality, chance), *_graded(table, chance)),
        "cost_usd": _evaluated(doubly_robust(cost, chance)),
    }


def _need_rows(table: LearningTable) -> None:
    checked = int(table.is_checked.sum())
    if len(table) < MIN_ROWS or checked < MIN_CHECKED:
        raise NothingToLearn(
            f"{len(table)} held-out requests, {checked} of them checked, cannot judge a router; "
            f"{MIN_ROWS} and {MIN_CHECKED} are needed."
        )


def _support(table: LearningTable) -> NDArray[np.bool_]:
    """Tiers whose worth the log can tell on each row: they may have answered, or are asked beside the top tier."""
    found = table.propensity > 0
    found[:, -1] = True
    asked = np.array([(table.label_origins[:, tier] == LabelOrigin.DOWN).any() for tier in range(table.num_tiers - 1)])
    found[:, :-1] |= asked & (table.propensity[:, -1:] > 0)
    return found


def _cannot_tell(num_unsupported: int, num_rows: int) -> RouterComparison:
    reason = (
        f"On {num_unsupported} of {num_rows} held-out requests one of the routers would use tiers that the log never "
        "tries there; raise the policy's exploration_share or sampling."
    )
    judgement = Judgement(PromotionVerdict.INSUFFICIENT, reason, *(float("nan"),) * 6, 0.0)
    body = {"verdict": judgement.verdict.value, "reason": reason, "num_unsupported": num_unsupported}
    return RouterComparison(judgement, body | {"num_rows": num_rows})


def _quality_rows(table: LearningTable, guess: Floats, support: NDArray[np.bool_]) -> LoggedRows:
    """Return every tier has an unbiased stand-in for its worth: nothing is left for the propensities to correct."""
    outcomes = table.shifted_outcomes(guess)
    return _settled(table, outcomes, support)


def _cost_rows(table: LearningTable, ladder: Ladder, support: NDArray[np.bool_]) -> LoggedRows:
    """Costs are known for every tier, by the price table and the tokens that were used."""
    return _settled(table, tier_costs_usd(table, ladder), support)


def _settled(table: LearningTable, outcomes: Floats, support: NDArray[np.bool_]) -> LoggedRows:
    """Return rows with every tier's outcome, weighed by how much of a router's own decisions the log shows."""
    seen, chance = table.sights()
    rows = np.arange(len(table))
    propensity = np.where(support, chance, 0.0)
    propensity[rows, seen] = chance[rows, seen]
    return LoggedRows(seen, propensity, outcomes[rows, seen], predicted=outcomes, weights=table.sampling_weight)


def _graded(table: LearningTable, target: Floats) -> tuple[OffPolicyEstimate | None, OffPolicyEstimate | None]:
    """IPS and SNIPS from answers whose own grade is known: the top tier's, and checked ones; None where they cannot."""
    rows = np.arange(len(table))
    at_top = table.served == table.num_tiers - 1
    tier = np.minimum(table.served, table.num_tiers - 2)
    is_up = ~at_top & (table.label_origins[rows, tier] == LabelOrigin.UP)
    kept = np.flatnonzero((at_top | is_up) & ((target > 0) <= (table.propensity > 0)).all(axis=1))
    if len(kept) < MIN_ROWS:
        return None, None
    part = table.take(kept)
    tier, at_top = tier[kept], at_top[kept]
    grade = np.where(at_top, 1.0, part.labels[np.arange(len(part)), tier])
    drawn = np.where(at_top, 1.0, part.chance[np.arange(len(part)), tier])
    logged = LoggedRows(part.served, part.propensity, grade, weights=part.sampling_weight / drawn)
    try:
        return inverse_propensity(logged, target[kept]), self_normalised(logged, target[kept])
    except ValueError:  # no logged decision agrees with the target
        return None, None


def _estimates(
    robust: OffPolicyEstimate, ips: OffPolicyEstimate | None, snips: OffPolicyEstimate | None
) -> dict[str, Any]:
    found = {"doubly_robust": robust, "inverse_propensity": ips, "self_normalised": snips}
    return {name: None if each is None else _evaluated(each) for name, each in found.items()}


def _evaluated(found: OffPolicyEstimate) -> dict[str, float]:
    return found.estimate.as_dict() | {"effective_rows": found.effective_rows, "max_weight": found.max_weight}
