"""A turn of many steps is one unit of every estimate, whatever was found of its steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.turn_outcome import turn_outcome

LOSSES = st.lists(st.floats(0, 1), max_size=6)


@pytest.mark.parametrize(
    ("drawn", "known", "num_steps", "inclusion", "expected"),
    [
        ([0.3], [], 1, 0.2, (0.3, 0.2)),
        ([], [1.0], 1, 0.2, (1.0, 1.0)),
        ([], [1.0], 4, 0.2, (0.25, 1.0)),
        ([0.0, 1.0], [], 2, 0.5, (0.5, 0.5)),
        # A check that failed is taken to be like the other one.
        ([1.0], [], 2, 0.5, (1.0, 0.5)),
        ([0.0], [1.0], 2, 0.1, (0.05, 0.1)),
    ],
)
def test_a_turn_counts_once(
    drawn: list[float], known: list[float], num_steps: int, inclusion: float, expected: tuple[float, float]
) -> None:
    assert turn_outcome(drawn, known, num_steps, inclusion) == pytest.approx(expected)


@given(LOSSES, LOSSES, st.integers(1, 20), st.floats(0.01, 1))
def test_a_loss_stays_a_loss(drawn: list[float], known: list[float], num_steps: int, inclusion: float) -> None:
    loss, chance = turn_outcome(drawn, known, num_steps, inclusion)
    assert 0.0 <= loss <= 1.0 + 1e-9
    assert inclusion <= chance <= 1.0


def test_weighted_turns_bring_back_the_mean_over_turns() -> None:
    rng = np.random.default_rng(5)
    inclusion, total, truth = 0.2, 0.0, 0.0
    num = 40_000
    for _ in range(num):
        losses = (rng.random(rng.integers(1, 6)) < rng.choice([0.1, 0.7])).astype(float)
        known = (losses == 1.0) & (rng.random(len(losses)) < 0.5)
        is_drawn = rng.random() < inclusion
        truth += losses.mean() / num
        drawn = losses[~known].tolist() if is_drawn else []
        if drawn or known.any():
            loss, chance = turn_outcome(drawn, losses[known].tolist(), len(losses), inclusion)
            total += loss / chance / num
    assert total == pytest.approx(truth, abs=0.015)
