"""No alarms from looking often, alarms when there is cause, whatever went before, from a state that fits in a row."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.drift_test import DriftDesign, DriftState, observe
from policies.judge_correction import GoldCounts

DESIGN = DriftDesign(0.1, (0.2,))


def first_alarm(design: DriftDesign, losses: np.ndarray) -> int | None:
    return observe(design, DriftState.start(design), losses.tolist()).alarmed_at


def test_a_design_in_true_rates_alarms_falsely_as_seldom_as_one_in_read_rates() -> None:
    assert DriftDesign.for_truth(0.1, 0.2) == DESIGN == DriftDesign.for_truth(0.1, 0.2, false_alarm=0.05)


def test_false_alarms_keep_to_their_share_over_a_year_of_samples() -> None:
    rng = np.random.default_rng(8)
    alarms = [first_alarm(DESIGN, rng.random(2600) < 0.1) is not None for _ in range(100)]
    # 5 % are allowed; more than 11 of 100 would come by chance once in 200 runs.
    assert sum(alarms) <= 11


@pytest.mark.parametrize("calm", [0, 300, 1500])
def test_a_doubled_rate_is_found_within_150_checked_answers_whenever_it_begins(calm: int) -> None:
    rng = np.random.default_rng(9)
    delays = []
    for _ in range(60):
        losses = np.concatenate([rng.random(calm) < 0.1, rng.random(1200) < 0.2])
        alarm = first_alarm(DESIGN, losses)
        if alarm is None or alarm > calm:
            delays.append(np.inf if alarm is None else alarm - calm)
    assert np.median(delays) <= 165  # 150 is the median over many more runs than these


@settings(max_examples=30)
@given(st.floats(0.02, 0.4), st.lists(st.floats(0, 1), max_size=60), st.integers(0, 60))
def test_looking_in_between_changes_nothing(in_order: float, losses: list[float], look: int) -> None:
    design = DriftDesign(in_order, (min(2 * in_order, 1.0),), horizon=20)
    at_once = observe(design, DriftState.start(design), losses)
    first = observe(design, DriftState.start(design), losses[:look])
    stored = DriftState.from_dict(json.loads(json.dumps(first.as_dict())))
    assert observe(design, stored, losses[look:]) == at_once


@given(st.floats(0.02, 0.4), st.integers(0, 80))
def test_no_purse_is_expected_to_grow_in_order(in_order: float, num_before: int) -> None:
    design = DriftDesign(in_order, (min(2 * in_order, 1.0), 0.9), horizon=40)
    before = observe(design, DriftState.start(design), [float(i % 7 == 0) for i in range(num_before)])
    up, down = (observe(design, before, [loss]).evidence for loss in (1.0, 0.0))
    assert in_order * up + (1 - in_order) * down == pytest.approx(before.evidence)


def test_a_judges_errors_are_not_drift() -> None:
    rng = np.random.default_rng(10)
    gold = GoldCounts(1800, 2000, 200, 2000)
    design = DriftDesign.for_truth(0.05, 0.2, gold)
    raw = DriftDesign(0.05, (0.2,))
    flags = rng.random(2000) < gold.flag_rate(0.05)
    assert first_alarm(raw, flags) is not None
    assert first_alarm(design, flags) is None
    assert first_alarm(design, rng.random(2000) < gold.flag_rate(0.2)) is not None


def test_an_unknown_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="gold"):
        DriftDesign.for_truth(0.1, 0.2, GoldCounts(0, 0, 0, 0))
    with pytest.raises(ValueError, match="gold"):
        DriftDesign.for_truth(0.1, 0.2, GoldCounts(9, 10, 1, 10))


@pytest.mark.parametrize(
    "bad",
    [
        {"in_order": 0.0},
        {"risen": ()},
        {"risen": (0.05,)},
        {"false_alarm": 0.0},
        {"horizon": 0},
        {"at_once": 1.0},
    ],
)
def test_designs_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"expected|horizon"):
        DriftDesign(**{"in_order": 0.1, "risen": (0.2,), **bad})  # type: ignore[arg-type]


def test_a_loss_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="loss"):
        observe(DESIGN, DriftState.start(DESIGN), [1.5])


def test_a_rise_that_lasts_does_not_outgrow_numbers() -> None:
    state = observe(DriftDesign(0.1, (0.9,)), DriftState.start(DriftDesign(0.1, (0.9,))), (1.0,) * 5000)
    assert math.isfinite(state.evidence)
    assert DriftState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    assert state.is_alarmed
