"""Tests whether the rate of needed upgrades has risen for a policy, a tenant or a domain; valid at any moment.

One probability of ever raising a false alarm is stated for everything together. Policies have most of it, tenants and
subjects a part each; within a family the k-th view to appear gets 6 / (pi k)^2 of the part, so that there may be any
number of them. A view belongs to one router: another router is another baseline, with the whole to spend again.

Losses are the grader's probabilities, or its verdicts where a gold set says well enough how it errs: the test then runs
on the rate at which such a grader would flag.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from gateway.control.stored_value import StoredValue
from gateway.store.monitoring import CheckedRow
from policies.drift_test import DriftDesign, DriftState, observe
from policies.judge_correction import GoldCounts

FAMILIES: Mapping[str, float] = {"policy": 0.8, "tenant": 0.1, "domain": 0.1}
MAX_VIEWS = 500
_REMEMBERED = 100


@dataclass(frozen=True, slots=True)
class DriftRule:
    """RateLimiter in true terms: ``in_order`` is no cause for alarm, ``risen`` is to be noticed."""

    in_order: float = 0.1
    risen: float = 0.2
    false_alarm: float = 0.05


@dataclass(frozen=True, slots=True)
class DriftView(StoredValue):
    """One test. ``reads`` is what of a check it is fed: ``p_good`` or ``verdict``; ``seen`` the last inclusions."""

    family: str
    name: str
    router_version: str
    false_alarm: float
    reads: str
    design: DriftDesign
    state: DriftState
    seen: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        return view_key(self.family, self.name, self.router_version)

    def shown(self) -> dict[str, Any]:
        """For those who look."""
        return {
            "family": self.family,
            "name": self.name,
            "router_version": self.router_version,
            "false_alarm": self.false_alarm,
            "reads": self.reads,
            "in_order": self.design.in_order,
            "risen": list(self.design.risen),
            "num_checked": self.state.num_checked,
            "evidence": self.state.evidence,
            "evidence_needed": 1.0 / self.design.false_alarm,
            "is_alarmed": self.state.is_alarmed,
            "alarmed_at": self.state.alarmed_at,
        }


def view_key(family: str, name: str, router_version: str) -> str:
    """Return the key of a view."""
    return f"{family}:{name}@{router_version}"


@dataclass(frozen=True, slots=True)
class DriftWatch:
    """All views; a value to be stored."""

    views: Mapping[str, DriftView] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: view.as_dict() for key, view in self.views.items()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        return cls({key: DriftView.from_dict(view) for key, view in stored.items()})

    def without(self, routers: Collection[str]) -> DriftWatch:
        """Only the views of these routers."""
        return DriftWatch({key: view for key, view in self.views.items() if view.router_version in routers})

    def renewed(self, family: str, name: str, router_version: str) -> DriftWatch:
        """Return a view begun anew, with what it has to spend; for after its cause was dealt with."""
        key = view_key(family, name, router_version)
        if key not in self.views:
            return self
        view = self.views[key]
        return DriftWatch({**self.views, key: replace(view, state=DriftState.start(view.design))})


def watch_drift(
    watch: DriftWatch,
    rows: Sequence[CheckedRow],
    rule: DriftRule,
    permitted: Mapping[str, float],
    gold: GoldCounts | None,
) -> tuple[DriftWatch, list[DriftView]]:
    """Return the watch after further checked answers, and the views that raised an alarm by them.

    Parameters
    ----------
    rows : in the order of their ends; only answers that were served count
    permitted : policy's name -> loss its floor permits, which is in order at the least
    gold : what is known of the grader; None for too little
    """
    views = dict(watch.views)
    alarmed: list[DriftView] = []
    for row in rows:
        if not row.is_up:
            continue
        for family, name in (("policy", row.policy_name), ("tenant", row.tenant), ("domain", row.domain)):
            if not name:
                continue
            key = view_key(family, name, row.router_version)
            view = views.get(key) or _begin(views, family, name, row, rule, permitted, gold)
            if view is None:
                continue
            after = _step(view, row)
            views[key] = after
            if after.state.is_alarmed and not view.state.is_alarmed:
                alarmed.append(after)
    return DriftWatch(views), alarmed


def _begin(
    views: Mapping[str, DriftView],
    family: str,
    name: str,
    row: CheckedRow,
    rule: DriftRule,
    permitted: Mapping[str, float],
    gold: GoldCounts | None,
) -> DriftView | None:
    place = 1 + sum(1 for view in views.values() if (view.family, view.router_version) == (family, row.router_version))
    if place > MAX_VIEWS:
        return None
    false_alarm = rule.false_alarm * FAMILIES[family] * 6.0 / (math.pi * place) ** 2
    in_order = max(rule.in_order, permitted.get(row.policy_name, 0.0))
    try:
        design, reads = make_design(rule, in_order, false_alarm, gold)
    except ValueError:
        return None
    return DriftView(family, name, row.router_version, false_alarm, reads, design, DriftState.start(design))


def _step(view: DriftView, row: CheckedRow) -> DriftView:
    """One more answer."""
    weight, seen = weigh(row.inclusion, view.seen)
    return replace(view, seen=seen, state=observe(view.design, view.state, (loss_of(row, view.reads),), (weight,)))


def loss_of(row: CheckedRow, reads: str) -> float:
    """0 (as good) to 1 (an upgrade was needed), by the grader's probability or by its verdict."""
    return row.loss if reads == "p_good" else 1.0 - row.verdict


def weigh(inclusion: float, seen: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """An answer's weight, so that densely drawn strata weigh no more than others, and the inclusions to remember."""
    seen = (*seen, inclusion)[-_REMEMBERED:]
    return min(seen) / inclusion, seen


def make_design(
    rule: DriftRule, in_order: float, false_alarm: float, gold: GoldCounts | None
) -> tuple[DriftDesign, str]:
    """Return the test for a rate, and what of a check it is to be fed.

    Raises
    ------
    ValueError
        There is no room for a rise above what is in order.
    """
    risen = min(in_order + (rule.risen - rule.in_order), 1.0)
    # Where the gold set leaves too much open about the grader, its own probabilities are the better reading.
    with contextlib.suppress(ValueError):
        if gold is not None:
            return DriftDesign.for_truth(in_order, risen, gold, false_alarm=false_alarm), "verdict"
    return DriftDesign(in_order, (risen,), false_alarm), "p_good"
