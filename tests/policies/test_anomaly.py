"""A tenant whose traffic jumps to the top raises an alert; one that stays as it was does not."""

from __future__ import annotations

import numpy as np
import pytest

from policies.anomaly import AlertRule, TenantWatch, watch

RULE = AlertRule()


def watched(decisions: np.ndarray) -> TenantWatch:
    state = TenantWatch()
    for went_top in decisions:
        state = watch(RULE, state, bool(went_top))
    return state


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_steady_tenants_are_left_alone(share: float) -> None:
    rng = np.random.default_rng(2)
    alarms = [watched(rng.random(2000) < share).is_alarmed for _ in range(30)]
    assert sum(alarms) <= 1


def test_a_jump_is_noticed_within_a_hundred_requests() -> None:
    rng = np.random.default_rng(3)
    delays = []
    for _ in range(20):
        state = watched(rng.random(600) < 0.05)
        assert not state.is_alarmed
        for number in range(500):
            state = watch(RULE, state, bool(rng.random() < 0.9))
            if state.is_alarmed:
                delays.append(number + 1)
                break
    assert len(delays) == 20
    assert np.median(delays) <= 100


def test_nothing_is_said_before_there_is_a_baseline() -> None:
    decisions = np.zeros(RULE.baseline_decisions, dtype=bool)
    before = watched(decisions[:-1])
    assert before.design is None
    assert not before.is_alarmed
    assert watched(decisions).design is not None, "the last decision of the baseline begins the watch"


def test_a_tenant_always_at_the_top_cannot_jump() -> None:
    assert not watched(np.ones(1000, dtype=bool)).is_alarmed


@pytest.mark.parametrize(
    "bad",
    [
        {"baseline_decisions": 0},
        {"min_rise": 1.0},
        {"min_rise": -0.1},
        {"false_alarm": 0.0},
        {"false_alarm": 1.0},
    ],
)
def test_rules_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AlertRule(**bad)  # type: ignore[arg-type]


def test_rules_at_the_edge_are_taken() -> None:
    assert AlertRule(baseline_decisions=1, min_rise=0.0).baseline_decisions == 1
