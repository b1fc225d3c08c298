"""Alerts on a tenant whose traffic suddenly goes to the dear tiers.

A phrase put in front of every prompt can fool a router into the top tier; the bill is then the victim's. The tenant's
share of top-tier decisions is held against its own earlier share by the same test that watches for drift, so looking
often raises no false alarms beyond those allowed.

It does not tell an attack from honest work that became harder: it says that somebody should look.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.drift_test import DriftDesign, DriftState, observe
from policies.intervals import binomial_upper

_LEAST_SHARE, _MOST_SHARE = 0.01, 0.9


@dataclass(frozen=True, slots=True)
class AlertRule:
    """States when to raise an alert.

    Parameters
    ----------
    baseline_decisions : decisions of a tenant that make its baseline before it is watched
    min_rise : rise of the top-tier share, in points, that is no cause for alarm
    false_alarm : probability of ever alerting on a tenant whose habits have not changed
    """

    baseline_decisions: int = 200
    min_rise: float = 0.1
    false_alarm: float = 0.01

    def __post_init__(self) -> None:
        if self.baseline_decisions < 1 or not 0 <= self.min_rise < 1 or not 0 < self.false_alarm < 1:
            raise ValueError("baseline_decisions must be at least 1, min_rise 0 to 1, false_alarm between 0 and 1.")


@dataclass(frozen=True, slots=True)
class TenantWatch:
    """One tenant's baseline, then the test against it; a value to be stored."""

    num_baseline: int = 0
    num_baseline_top: int = 0
    design: DriftDesign | None = None
    state: DriftState | None = None

    @property
    def is_alarmed(self) -> bool:
        """Return whether this tenant's share of the top tier jumped."""
        return self.state is not None and self.state.is_alarmed


def watch(rule: AlertRule, watched: TenantWatch, went_top: bool) -> TenantWatch:
    """Return the watch after one more decision that the router made itself; leave out pinned and explored ones."""
    if watched.design is None or watched.state is None:
        seen = TenantWatch(watched.num_baseline + 1, watched.num_baseline_top + went_top)
        return _armed(rule, seen) if seen.num_baseline >= rule.baseline_decisions else seen
    state = observe(watched.design, watched.state, (float(went_top),))
    return TenantWatch(watched.num_baseline, watched.num_baseline_top, watched.design, state)


def _armed(rule: AlertRule, watched: TenantWatch) -> TenantWatch:
    """Test against the most that the baseline may have been; half the false alarms are spent on not knowing it."""
    half = rule.false_alarm / 2
    share = binomial_upper(watched.num_baseline_top, watched.num_baseline, 1.0 - half) + rule.min_rise
    if share >= _MOST_SHARE:
        return watched  # already at the top: there is nowhere to jump
    in_order = max(share, _LEAST_SHARE)
    risen = (in_order + 1.0) / 2
    design = DriftDesign(in_order, (min(in_order * 1.5, risen), risen), half)
    return TenantWatch(watched.num_baseline, watched.num_baseline_top, design, DriftState.start(design))
