"""Reports what routing earned and cost, beside each tier alone and beside plain ways of choosing at the same cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.builtin.tasks.types import Task
from classifier.curves import LadderCurve, ladder_curve
from classifier.evaluation import length_estimates
from classifier.metrics import bootstrap_interval
from gateway.bench.ladder_client import LadderReply
from policies.tier_mixes import best_mix_at_cost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ACCURACY_GOAL = 0.97
COST_GOAL = 0.40


@dataclass(frozen=True, slots=True)
class LadderRun:
    """Everything one run saw, as arrays; columns are tiers.

    Attributes
    ----------
    tasks : the n tasks
    right : float64 (n, num_tiers), 1 where the tier alone was right
    priced, measured : float64 (n, num_tiers), USD by price table and by device seconds (NaN where unknown)
    seconds : float64 (n, num_tiers), device seconds
    tokens : float64 (n, num_tiers), tokens of each completion, thinking included
    routed : the routed replies
    names : of the tiers
    """

    tasks: Sequence[Task]
    right: Floats
    priced: Floats
    measured: Floats
    seconds: Floats
    tokens: Floats
    routed: Sequence[LadderReply]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        pinned: Sequence[Sequence[LadderReply]],
        routed: Sequence[LadderReply],
        names: Sequence[str],
    ) -> LadderRun:
        """From the replies of each tier alone, cheapest first, and the routed ones."""

        def column(read: Callable[[LadderReply], float | None]) -> Floats:
            rows = [[read(reply) for reply in replies] for replies in pinned]
            return np.array(rows, dtype=np.float64).T

        return cls(
            tasks,
            column(lambda r: float(r.is_right)),
            column(lambda r: r.cost_usd),
            column(lambda r: r.measured_cost_usd),
            column(lambda r: r.compute_s),
            column(lambda r: float(r.completion_tokens)),
            routed,
            tuple(names),
        )

    @property
    def routed_right(self) -> Floats:
        return np.array([float(reply.is_right) for reply in self.routed])

    @property
    def routed_tiers(self) -> Ints:
        """Column of the tier that answered each routed request."""
        return np.array([reply.tier - 1 for reply in self.routed], dtype=np.int64)

    @property
    def estimates(self) -> Floats | None:
        """P(right) as the router said, float64 (n, num_tiers); None where any request went without."""
        found = [reply.p_right for reply in self.routed]
        return np.array(found) if all(found) else None


def summarise(run: LadderRun, *, seed: int, num_resamples: int = 1000) -> dict[str, Any]:
    """Return the JSON of a run: tiers, routed, baselines at the routed cost, and whether the goals were met."""
    routed = _routed(run, seed, num_resamples)
    return {
        "num_tasks": len(run.tasks),
        "tiers": [_tier(run, column, seed, num_resamples) for column in range(len(run.names))],
        "routed": routed,
        "where_seconds_go": _where_seconds_go(run),
        "at_the_same_cost": baselines(run),
        "by_grade": _by_grade(run),
        "goals": {
            "accuracy_vs_top": ACCURACY_GOAL,
            "cost_vs_top": COST_GOAL,
            "met_priced": _is_met(routed, "cost_vs_top"),
            "met_measured": _is_met(routed, "measured_cost_vs_top"),
        },
    }


def _is_met(routed: Mapping[str, Any], cost: str) -> bool | None:
    if routed[cost] is None:
        return None
    return bool(routed["accuracy_vs_top"]["value"] >= ACCURACY_GOAL and routed[cost]["value"] <= COST_GOAL)


def _tier(run: LadderRun, column: int, seed: int, num_resamples: int) -> dict[str, Any]:
    right = run.right[:, column]
    return {
        "tier": column + 1,
        "name": run.names[column],
        "accuracy": _interval(lambda rows: float(right[rows].mean()), len(right), seed, num_resamples),
        "cost_usd": float(run.priced[:, column].mean()),
        "measured_cost_usd": _known(float(run.measured[:, column].mean())),
        "compute_s": _known(float(run.seconds[:, column].mean())),
        "completion_tokens": float(run.tokens[:, column].mean()),
    }


def _routed(run: LadderRun, seed: int, num_resamples: int) -> dict[str, Any]:
    n, right, top = len(run.tasks), run.routed_right, run.right[:, -1]
    priced = np.array([reply.cost_usd for reply in run.routed])
    measured = np.array([np.nan if r.measured_cost_usd is None else r.measured_cost_usd for r in run.routed])
    rows = np.arange(n)
    as_pinned = run.measured[rows, run.routed_tiers]

    def ratio(above: Floats, below: Floats) -> dict[str, float] | None:
        if np.isnan(above).any() or np.isnan(below).any():
            return None
        return _interval(lambda picked: float(above[picked].sum() / below[picked].sum()), n, seed, num_resamples)

    same_answer = sum(reply.is_right == bool(run.right[i, reply.tier - 1]) for i, reply in enumerate(run.routed))
    reasons = [reply.decision_reason for reply in run.routed]
    return {
        "accuracy": _interval(lambda picked: float(right[picked].mean()), n, seed, num_resamples),
        "accuracy_vs_top": ratio(right, top),
        "cost_usd": float(priced.mean()),
        "cost_vs_top": ratio(priced, run.priced[:, -1]),
        "measured_cost_usd": _known(float(measured.mean())),
        "measured_cost_vs_top": ratio(measured, run.measured[:, -1]),
        # The same decisions at the seconds each tier took when it ran alone: tiers do not disturb each other there.
        "measured_cost_vs_top_if_alone": ratio(as_pinned, run.measured[:, -1]),
        "shares": (np.bincount(run.routed_tiers, minlength=len(run.names)) / n).tolist(),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "share_graded_as_pinned": same_answer / n,
        "overhead_ms_p50": float(np.median([reply.overhead_s for reply in run.routed])) * 1e3,
    }


def _where_seconds_go(run: LadderRun) -> list[dict[str, Any]] | None:
    """Compare what each tier's routed requests took with the same tier alone, on the same requests and on all.

    The first over the second is what sharing the machine costs; the second over the third, how much longer than others
    are the requests sent there.
    """
    seconds = np.array([np.nan if reply.compute_s is None else reply.compute_s for reply in run.routed])
    if np.isnan(seconds).any() or np.isnan(run.seconds).any():
        return None
    found = []
    for column in range(len(run.names)):
        rows = run.routed_tiers == column
        if not rows.any():
            continue
        found.append(
            {
                "tier": column + 1,
                "share_of_requests": float(rows.mean()),
                "share_of_seconds": float(seconds[rows].sum() / seconds.sum()),
                "compute_s": float(seconds[rows].mean()),
                "compute_s_if_alone": float(run.seconds[rows, column].mean()),
                "compute_s_of_all_if_alone": float(run.seconds[:, column].mean()),
                "completion_tokens": float(run.tokens[rows, column].mean()),
            }
        )
    return found


def baselines(run: LadderRun) -> dict[str, Any]:
    """Accuracy that each plain way of choosing reaches at the routed requests' mean price."""
    budget = float(np.mean([reply.cost_usd for reply in run.routed]))
    costs, accuracies = run.priced.mean(axis=0), run.right.mean(axis=0)
    shares = np.bincount(run.routed_tiers, minlength=len(run.names)) / len(run.tasks)
    mix = best_mix_at_cost(costs.tolist(), accuracies.tolist(), budget)
    curves = curves_of(run)
    return {
        "budget_usd": budget,
        "random_same_shares": float(shares @ accuracies),
        "best_fixed_mix": None if mix is None else mix.quality,
        "length_only": _known(curves["length"].quality_at(budget)),
        "oracle": _known(curves["oracle"].quality_at(budget)),
    }


def curves_of(run: LadderRun) -> dict[str, LadderCurve]:
    """Cost-quality curves by price.

    Of the router's own estimates, of prompt length alone (fitted on the other tasks), and of an oracle that knows who
    is right.
    """
    n = len(run.tasks)
    lengths = np.array([len(task.prompt) for task in run.tasks], dtype=np.float64)
    estimates = {"length": length_estimates(lengths, run.right, np.arange(n) % 5), "oracle": run.right}
    if (own := run.estimates) is not None:
        estimates["router"] = own
    return {name: ladder_curve(each, run.right, run.priced) for name, each in estimates.items()}


def _by_grade(run: LadderRun) -> list[dict[str, Any]]:
    grades = np.array([task.grade for task in run.tasks])
    found = []
    for grade in np.unique(grades):
        rows = grades == grade
        shares = np.bincount(run.routed_tiers[rows], minlength=len(run.names)) / rows.sum()
        found.append(
            {
                "grade": int(grade),
                "num_tasks": int(rows.sum()),
                "accuracy": run.right[rows].mean(axis=0).tolist(),
                "routed_accuracy": float(run.routed_right[rows].mean()),
                "routed_shares": shares.tolist(),
            }
        )
    return found


def _interval(statistic: Callable[[Ints], float], n: int, seed: int, num_resamples: int) -> dict[str, float]:
    return bootstrap_interval(statistic, np.arange(n), seed=seed, num_resamples=num_resamples).as_dict()


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
