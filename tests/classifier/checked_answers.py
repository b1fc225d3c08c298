"""Checked answers of a made-up ladder of three tiers, with what they should teach."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from classifier.adjustment import Space
from classifier.checked_rows import CheckedRows
from classifier.features import feature_names
from classifier.log_view import LogViews

NUM_TIERS = 3
NUM_COMPONENTS = 6
WIDTH = len(feature_names(NUM_TIERS))
SPACE = Space(np.zeros(WIDTH, dtype=np.float32), np.ones(WIDTH, dtype=np.float32))


def make_views(rng: np.random.Generator, count: int, *, moved: NDArray[np.bool_] | None = None) -> LogViews:
    """Familiar prompts around the origin; ``moved`` ones are of a kind apart, foreign to the base router."""
    moved = np.zeros(count, dtype=np.bool_) if moved is None else moved
    dense = rng.normal(0, 1, (count, WIDTH)).astype(np.float32)
    dense[moved, :5] += 4.0
    sketch = rng.normal(0, 1, (count, NUM_COMPONENTS)).astype(np.float32)
    good = np.clip(0.8 + 0.1 * dense[:, 10:13], 0.02, 0.98).astype(np.float64)
    good[:, -1] = 1.0
    right = np.clip(good - 0.02, 0.0, 1.0)
    novelty = np.where(moved, 0.999, 0.3)
    return LogViews(dense=dense, sketch=sketch, right=right, good=good, novelty=novelty)


def make_checked(
    rng: np.random.Generator, count: int, *, share_moved: float, p_moved: float, share_checked: float = 0.7
) -> tuple[CheckedRows, NDArray[np.bool_]]:
    """Checks of both lower tiers; on moved prompts they succeed with ``p_moved``, elsewhere as the base router says."""
    moved = rng.random(count) < share_moved
    views = make_views(rng, count, moved=moved)
    truth = np.where(moved[:, None], p_moved, views.good[:, :-1])
    labels = (rng.random(truth.shape) < truth).astype(np.float64)
    labels[rng.random(truth.shape) > share_checked] = np.nan
    labels[np.isnan(labels).all(axis=1), 0] = 1.0
    weights = np.full(labels.shape, 20.0)
    return CheckedRows(views=views, labels=labels, weights=weights, groups=np.arange(count)), moved
