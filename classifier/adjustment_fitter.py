"""Fits adjustments to checked answers, several kinds, and says on rows left out what each is worth.

Every kind contains "no change" and is shrunk towards it, because the base router rests on thousands of outcomes and a
week's checks are often some hundreds. Which kind serves is decided by log-loss on folds left out, whole groups of
near-duplicates apart.

References
----------
Friedman, Hastie and Tibshirani 2000, "Additive Logistic Regression" (the Newton step that the trees fit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.adjustment import Adjustment, BoostedTrees, Neighbours, Space
from classifier.checked_rows import CheckedRows
from classifier.errors import TrainingError
from classifier.fitting import flatten_boosting
from classifier.folds import fold_splits
from classifier.heads import bounded_logit, sigmoid
from classifier.metrics import log_loss
from classifier.rows import Floats, Ints

MIN_LABELS = 40
NUM_FOLDS = 5
MAX_POINTS = 3000
_REACH_NEIGHBOUR = 10
_REACH_FACTOR = 1.5
_MIN_LABELS_FOR_TREES = 300
_ONLY_FAMILIAR = 1e9
_MAX_STEP = 4.0
# How strongly each coefficient is pulled to "no change". A level is learnt from few checks, a slope from more; some
# eighty coordinates could together fit anything, so each needs the most.
_LEVEL_PENALTY, _SLOPE_PENALTY, _COORDINATE_PENALTY = 1.0, 20.0, 60.0
# A split that falls between two of so many is as good as any, for the few hundred answers there are.
_NUM_BINS = 64

Fit = Callable[[CheckedRows, Space, int], Adjustment]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Names a way to fit, and the same with the nearest checks after it; None where that is no kind."""

    name: str
    fit: Fit
    beside: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.beside is None else (self.name, self.beside)

    def fits(self, rows: CheckedRows, space: Space, seed: int) -> dict[str, Adjustment]:
        """Return the fit by its name, and what rests on the very same fit with neighbours."""
        plain = self.fit(rows, space, seed)
        found = {self.name: plain}
        if self.beside is not None:
            found[self.beside] = _with_neighbours(plain, rows)
        return found


Kinds = tuple[_Kind, ...]


@dataclass(frozen=True, slots=True)
class FittedAdjustment:
    """Holds the adjustment of the best kind, and what every kind was worth.

    Attributes
    ----------
    kind : its name, ``unchanged`` where nothing beats the base router
    adjustment : fitted on all rows
    left_out : float64 (n, num_tiers - 1), P(as good) of each row by a fit that had not seen it
    losses : kind -> log-loss of the checked answers left out
    """

    kind: str
    adjustment: Adjustment
    left_out: Floats
    losses: Mapping[str, float]


def fit_adjustment(rows: CheckedRows, space: Space, *, seed: int) -> FittedAdjustment:
    """Fit every kind, choose by left-out log-loss, fit the chosen one on all rows.

    Raises
    ------
    TrainingError
        Fewer than ``MIN_LABELS`` checked answers, or all of one group.
    """
    if rows.num_labels < MIN_LABELS:
        raise TrainingError(f"{rows.num_labels} checked answers cannot carry an adjustment; {MIN_LABELS} are needed.")
    kinds = KINDS if rows.num_labels >= _MIN_LABELS_FOR_TREES else KINDS_WITHOUT_TREES
    guesses = _left_out(kinds, rows, space, _folds(rows.groups, seed), seed)
    losses = {name: _loss(guess, rows) for name, guess in guesses.items()}
    best = min(losses, key=losses.__getitem__)
    (kind,) = [kind for kind in kinds if best in kind.names]
    return FittedAdjustment(best, kind.fits(rows, space, seed)[best], guesses[best], losses)


def _folds(groups: Ints, seed: int) -> Ints:
    unique, inverse = np.unique(groups, return_inverse=True)
    count = min(NUM_FOLDS, len(unique))
    if count < 2:
        raise TrainingError("All checked answers are to one wording; nothing could be left out to judge by.")
    dealt: Ints = (np.random.default_rng(seed).permutation(len(unique)) % count)[inverse]
    return dealt


def _left_out(kinds: Kinds, rows: CheckedRows, space: Space, folds: Ints, seed: int) -> dict[str, Floats]:
    """Return what each kind says of each row, by a fit that had not seen it."""
    found = {name: np.empty(rows.labels.shape) for kind in kinds for name in kind.names}
    for inside, outside in fold_splits(folds):
        for kind in kinds:
            for name, adjustment in kind.fits(rows.take(inside), space, seed).items():
                _, good, _ = adjustment(rows.views.take(outside))
                found[name][outside] = good[:, :-1]
    return found


def _loss(guess: Floats, rows: CheckedRows) -> float:
    """Average over the checked answers, equally weighed: the weights of rare checks would drown the comparison."""
    known = ~np.isnan(rows.labels)
    return log_loss(guess[known], rows.labels[known])


def _unchanged(rows: CheckedRows, space: Space, seed: int) -> Adjustment:
    """Leave the base router's estimates as they are; the checks still tell what is familiar."""
    return _familiar(Adjustment(space, _no_change(rows, space)), rows)


def _recalibrated(rows: CheckedRows, space: Space, seed: int) -> Adjustment:
    """Fit each tier's slope and intercept."""
    x = space.place(rows.views)
    num_tiers = rows.labels.shape[1]
    linear = _no_change(rows, space)
    weights = rows.tempered_weights()
    penalty = np.array([_SLOPE_PENALTY, _LEVEL_PENALTY])
    for tier in range(num_tiers):
        # The tier's own log-odds; behind those of all tiers comes novelty.
        column = x.shape[1] - 1 - num_tiers + tier
        picked = [column, x.shape[1]]
        design = np.column_stack([x[:, column], np.ones(len(x))])
        linear[picked, tier] = _ridge_logistic(design, rows, tier, weights[:, tier], penalty)
    return _familiar(Adjustment(space, linear), rows)


def _linear(rows: CheckedRows, space: Space, seed: int) -> Adjustment:
    """Fit all coordinates, every one shrunk to no change."""
    x = space.place(rows.views)
    num_tiers = rows.labels.shape[1]
    design = np.column_stack([x, np.ones(len(x))])
    penalty = np.full(design.shape[1], _COORDINATE_PENALTY)
    penalty[-1] = _LEVEL_PENALTY
    weights = rows.tempered_weights()
    columns = [_ridge_logistic(design, rows, tier, weights[:, tier], penalty) for tier in range(num_tiers)]
    return _familiar(Adjustment(space, np.column_stack(columns)), rows)


def _boosted(rows: CheckedRows, space: Space, seed: int) -> Adjustment:
    """Fit one Newton step from the recalibrated router by boosted trees."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    start = _recalibrated(rows, space, seed)
    x = space.place(rows.views)
    _, good, _ = start(rows.views)
    weights = rows.tempered_weights()
    models: list[Any] = []
    for tier in range(rows.labels.shape[1]):
        known = np.flatnonzero(~np.isnan(rows.labels[:, tier]))
        if len(known) < MIN_LABELS:
            models.append(None)
            continue
        p = good[known, tier]
        # Near certainty a Newton step has no bound: one surprising check would move everything around it.
        curvature = np.maximum(p * (1 - p), 0.02)
        step = np.clip((rows.labels[known, tier] - p) / curvature, -_MAX_STEP, _MAX_STEP)
        # Small, slow and shrunk: some hundred checks, of which each leaf keeps twenty.
        model = HistGradientBoostingRegressor(
            learning_rate=0.05,
            max_iter=60,
            max_leaf_nodes=8,
            min_samples_leaf=20,
            l2_regularization=10.0,
            random_state=seed,
        )
        models.append(model.fit(_coarse(x[known]), step, sample_weight=weights[known, tier] * curvature))
    trees = flatten_boosting(models)
    return Adjustment(space, start.linear, None if trees is None else BoostedTrees(trees), start.neighbours)


def _coarse(x: Floats) -> NDArray[np.float32]:
    """Return every value as the mean of its bin, of at most ``_NUM_BINS`` in its column.

    Of columns with more values than it has bins the library takes weighted quantiles, which cost ten times its trees.
    """
    coarse = np.empty(x.shape, np.float32)
    bounds = np.quantile(x, np.linspace(0, 1, _NUM_BINS + 1)[1:-1], axis=0)
    for column, values in enumerate(x.T):
        bins = np.searchsorted(np.unique(bounds[:, column]), values, side="left")
        counts = np.bincount(bins)
        means = np.bincount(bins, weights=values) / np.maximum(counts, 1)
        coarse[:, column] = means[bins]
    return coarse


def _with_neighbours(found: Adjustment, rows: CheckedRows) -> Adjustment:
    """Add to a fit the answers checked among the nearest prompts."""
    plain = Adjustment(found.space, found.linear, found.boosted)
    _, good, _ = plain(rows.views)
    residual = np.nan_to_num(rows.labels - good[:, :-1])
    return Adjustment(found.space, found.linear, found.boosted, _points(rows, found.space, residual, prior=4.0))


def _familiar(plain: Adjustment, rows: CheckedRows) -> Adjustment:
    """Add the checked prompts to a fit for what they say about novelty alone."""
    points = _points(rows, plain.space, np.zeros(rows.labels.shape), prior=_ONLY_FAMILIAR)
    return Adjustment(plain.space, plain.linear, plain.boosted, points)


def _points(rows: CheckedRows, space: Space, residual: Floats, *, prior: float) -> Neighbours:
    """Return the newest checks as points; they reach a little beyond what the tenth nearest is usually away."""
    kept = np.arange(max(len(rows) - MAX_POINTS, 0), len(rows))
    width = rows.labels.shape[1] + 1
    # Half precision here as in the file, so that a router predicts the same before and after it was saved.
    points = space.place(rows.views.take(kept))[:, :-width].astype(np.float16).astype(np.float32)
    weights = np.where(np.isnan(rows.labels[kept]), 0.0, np.clip(rows.tempered_weights()[kept], 0.2, 2.0))
    half = [each.astype(np.float16).astype(np.float32) for each in (residual[kept], weights)]
    return Neighbours(points, half[0], half[1], _reach(points), prior)


def _reach(points: Any) -> float:
    """Return half as much again as the median squared distance to the tenth nearest, over at most 500 points."""
    some = points[:: max(len(points) // 500, 1)]
    square = (some**2).sum(axis=1)[:, None] + (points**2).sum(axis=1) - 2 * some @ points.T
    place = min(_REACH_NEIGHBOUR, square.shape[1] - 1)
    return max(float(np.median(np.partition(square, place, axis=1)[:, place])) * _REACH_FACTOR, 1e-3)


def _no_change(rows: CheckedRows, space: Space) -> Floats:
    width = space.place(rows.views.take(np.arange(1))).shape[1]
    return np.zeros((width + 1, rows.labels.shape[1]))


def _ridge_logistic(design: Floats, rows: CheckedRows, tier: int, weights: Floats, penalty: Floats) -> Floats:
    """Fit a logistic regression beside a fixed offset, the base log-odds, to soft labels by Newton's method."""
    known = np.flatnonzero(~np.isnan(rows.labels[:, tier]))
    beta = np.zeros(design.shape[1])
    if not len(known):
        return beta
    x, y, w = design[known], rows.labels[known, tier], weights[known]
    offset = bounded_logit(rows.views.good[known, tier])
    for _ in range(25):
        p = sigmoid(offset + x @ beta)
        gradient = x.T @ (w * (y - p)) - penalty * beta
        hessian = (x * (w * np.maximum(p * (1 - p), 1e-3))[:, None]).T @ x + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        # A damped step cannot leap over the optimum from estimates that are all but certain.
        beta += step * min(1.0, _MAX_STEP / max(float(np.abs(x @ step).max()), 1e-12))
        if float(np.abs(step).max()) < 1e-6:
            break
    return beta


# Simplest first: of equal losses the first wins.
KINDS_WITHOUT_TREES: Kinds = (
    _Kind("unchanged", _unchanged),
    _Kind("recalibrated", _recalibrated, "neighbours"),
    _Kind("linear", _linear, "linear and neighbours"),
)
KINDS: Kinds = (*KINDS_WITHOUT_TREES, _Kind("boosted", _boosted, "boosted and neighbours"))
