"""A calibration is a monotone map to probabilities, the same alone and in a bank, and unsound banks are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from classifier.fitting import fit_calibrator
from classifier.heads import MAX_LOGIT, Calibrator, CalibratorBank, sigmoid
from classifier.metrics import log_loss

logits = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-MAX_LOGIT, MAX_LOGIT))
PLATT = Calibrator(0.5, -1.0, np.empty(0), np.empty(0))
ISOTONIC = Calibrator(0.0, 0.0, np.array([-1.0, 0.0, 2.0]), np.array([0.1, 0.4, 0.9]))
BANK = CalibratorBank.pack([PLATT, ISOTONIC, PLATT, ISOTONIC])


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.just(4)), elements=st.floats(-MAX_LOGIT, MAX_LOGIT)))
def test_a_bank_says_what_its_calibrators_say(rows: np.ndarray) -> None:
    BANK.check()
    alone = [each(rows[:, output]) for output, each in enumerate((PLATT, ISOTONIC, PLATT, ISOTONIC))]
    assert BANK(rows) == pytest.approx(np.stack(alone, axis=1))


@given(logits)
def test_beyond_its_knots_a_calibration_stays_at_the_last(z: np.ndarray) -> None:
    said = ISOTONIC(z)
    assert (said >= 0.1).all()
    assert (said <= 0.9).all()
    assert (said[z <= -1.0] == 0.1).all()
    assert (said[z >= 2.0] == 0.9).all()


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_fit_never_turns_an_order_round(seed: int, against: bool) -> None:
    """Even where the estimates say the opposite of what happened."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=60)
    y = (rng.random(60) < sigmoid(-3 * z if against else 3 * z)).astype(np.float64)
    fit = fit_calibrator(z, y, np.ones(60), np.arange(60) % 5)
    grid = fit(np.linspace(-6, 6, 50))
    assert (np.diff(grid) >= 0).all()
    assert grid.min() > 0
    assert grid.max() < 1


def test_what_was_not_observed_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=200)
    y = (rng.random(200) < sigmoid(z)).astype(np.float64)
    folds, weights = np.arange(200) % 5, np.ones(200)
    hidden = np.concatenate([y, np.full(200, np.nan)])
    more = fit_calibrator(
        np.concatenate([z, z + 3]), hidden, np.concatenate([weights, 9 * weights]), np.concatenate([folds, folds])
    )
    assert more(z) == pytest.approx(fit_calibrator(z, y, weights, folds)(z))


@pytest.mark.parametrize(("outcome", "expected"), [(1.0, 40.5 / 41), (0.0, 0.5 / 41), (np.nan, 0.5)])
def test_of_one_class_the_prior_is_said_whatever_the_logit(outcome: float, expected: float) -> None:
    fit = fit_calibrator(np.linspace(-3, 3, 40), np.full(40, outcome), np.ones(40), np.arange(40) % 5)
    assert fit.kind == "platt"
    assert fit(np.array([-5.0, 5.0])) == pytest.approx([expected, expected], abs=1e-3)


def test_weights_count_as_rows_do() -> None:
    z = np.tile([-1.0, 1.0], 300)
    y = np.tile([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], 100)
    doubled = fit_calibrator(z, y, np.where(y > 0, 2.0, 1.0), np.arange(600) % 5)
    repeated = np.concatenate([np.arange(600), np.flatnonzero(y > 0)])
    rows = fit_calibrator(z[repeated], y[repeated], np.ones(len(repeated)), (np.arange(600) % 5)[repeated])
    assert doubled(np.array([-1.0, 1.0])) == pytest.approx(rows(np.array([-1.0, 1.0])), abs=0.01)


def test_the_kind_with_less_loss_on_left_out_folds_is_taken() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(scale=2.0, size=4000)
    steps = np.where(z > 1, 0.9, np.where(z > -1, 0.5, 0.1))
    y = (rng.random(4000) < steps).astype(np.float64)
    fit = fit_calibrator(z, y, np.ones(4000), np.arange(4000) % 5)
    assert fit.kind == "isotonic"
    fresh = (rng.random(4000) < steps).astype(np.float64)
    assert log_loss(fit(z), fresh) < log_loss(sigmoid(z), fresh) - 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": np.array([0, 0, 3, 3, 9])},
        {"offsets": np.array([1, 1, 3, 3, 6])},
        {"offsets": np.array([0, 4, 3, 3, 6])},
        {"x": np.array([0.0, -1.0, 2.0, -1.0, 0.0, 2.0])},
        {"y": np.array([0.1, 0.4, 1.9, 0.1, 0.4, 0.9])},
        {"y": np.array([0.1, 0.4, 0.9])},
    ],
)
def test_an_unsound_bank_is_refused(change: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        replace(BANK, **change).check()
