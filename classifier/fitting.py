"""Fits scikit-learn estimators on encoded rows and turns them into the plain heads that serve.

This is the one place, with :mod:`classifier.training`, that imports scikit-learn; serving does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from classifier.hashing import SparseRows
from classifier.heads import MAX_LOGIT, Calibrator, ForestHead, LinearHead
from classifier.metrics import log_loss
from classifier.rows import Floats

Matrix = Any  # scipy.sparse.csr_matrix, which is untyped

DENSE_SHRINK = 0.1
"""Dense features enter the linear model at a tenth of their size, so that its penalty treats a TF-IDF row of unit
length and some fifty standard scores alike; the factor is folded into the stored weights."""

MAX_DEPTH = 14
_FOREST_ROWS = 256
"""A walk down all trees takes as many steps as the deepest has levels; beyond this depth nothing was gained."""


def sparse_matrix(rows: SparseRows, num_buckets: int) -> Matrix:
    """Return TF-IDF rows as float32 CSR (n, num_buckets)."""
    return sparse.csr_matrix((rows.values, rows.buckets, rows.starts), shape=(len(rows), num_buckets))


def fit_projection(matrix: Matrix, num_components: int, seed: int) -> NDArray[np.float32]:
    """Return leading right singular vectors of the TF-IDF matrix, float32 (num_buckets, k), orthonormal columns."""
    k = max(1, min(num_components, min(matrix.shape) - 1))
    found = TruncatedSVD(k, n_iter=4, random_state=seed).fit(matrix).components_
    return np.ascontiguousarray(found.T, dtype=np.float32)


def _soft_rows(target: Floats, weights: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return rows, classes and weights that stand for targets between 0 and 1: half right is half a row of each."""
    known = np.flatnonzero(~np.isnan(target))
    positive, negative = known[target[known] > 0], known[target[known] < 1]
    rows = np.concatenate([positive, negative])
    classes = np.repeat([1, 0], [len(positive), len(negative)])
    shares = np.concatenate([target[positive], 1 - target[negative]])
    return rows, classes, weights[rows] * shares


def prior_logit(target: Floats, weights: Floats) -> float:
    """Return log-odds of the weighted mean outcome under Jeffreys' prior; 0 where nothing is known."""
    known = ~np.isnan(target)
    if not known.any():
        return 0.0
    share = float(np.average(target[known], weights=weights[known]))
    num = int(known.sum())
    p = (share * num + 0.5) / (num + 1)
    return float(np.clip(np.log(p / (1 - p)), -MAX_LOGIT, MAX_LOGIT))


def fit_linear(matrix: Matrix, dense: NDArray[np.float32], targets: Floats, weights: Floats, c: float) -> LinearHead:
    """Fit one logistic regression an output over the same features; an output of one class gets its prior.

    Parameters
    ----------
    matrix : CSR (n, num_buckets)
    dense : float32 (n, num_dense)
    targets : float64 (n, num_outputs), NaN where unknown
    weights : float64 (n,)
    c : inverse strength of the L2 penalty
    """
    features = sparse.hstack([matrix, sparse.csr_matrix(dense * DENSE_SHRINK)]).tocsr()
    num_buckets, num_outputs = matrix.shape[1], targets.shape[1]
    coefficients = np.zeros((features.shape[1], num_outputs))
    bias = np.zeros(num_outputs)
    for output in range(num_outputs):
        rows, classes, shares = _soft_rows(targets[:, output], weights)
        if len(set(classes.tolist())) < 2:
            bias[output] = prior_logit(targets[:, output], weights)
            continue
        model = LogisticRegression(C=c, max_iter=1000).fit(
            features[rows], classes, sample_weight=shares / shares.mean()
        )
        coefficients[:, output], bias[output] = model.coef_[0], model.intercept_[0]
    dense_weights = coefficients[num_buckets:] * DENSE_SHRINK
    # Half precision in memory as in the file, so that a router predicts the same before and after it was saved.
    stored = coefficients[:num_buckets].astype(np.float16).astype(np.float32)
    return LinearHead(stored, dense_weights.astype(np.float32), bias.astype(np.float32))


def linear_logits(head: LinearHead, matrix: Matrix, dense: NDArray[np.float32]) -> Floats:
    """Return :meth:`LinearHead.logits` of many rows, float64 (n, num_outputs)."""
    total = np.asarray(matrix @ head.sparse, dtype=np.float64) + dense @ head.dense + head.bias
    return np.clip(total, -MAX_LOGIT, MAX_LOGIT)


def fit_forest(
    features: NDArray[np.float32],
    targets: Floats,
    weights: Floats,
    *,
    num_trees: int,
    max_leaves: int,
    min_leaf: int,
    seed: int,
) -> ForestHead:
    """Fit extremely randomised trees whose leaves hold every output's mean.

    Parameters
    ----------
    features : float32 (n, d)
    targets : float64 (n, num_outputs), all known, 0..1
    weights : float64 (n,)

    References
    ----------
    Geurts, Ernst and Wehenkel 2006, "Extremely Randomized Trees".
    """
    model = ExtraTreesRegressor(
        num_trees,
        max_leaf_nodes=max_leaves,
        max_depth=MAX_DEPTH,
        min_samples_leaf=min_leaf,
        max_features=0.4,
        random_state=seed,
    )
    model.fit(features, targets, sample_weight=weights)
    return flatten_forest([each.tree_ for each in model.estimators_], targets.shape[1])


def flatten_forest(trees: Sequence[Any], num_outputs: int) -> ForestHead:
    """Renumber scikit-learn's trees so that siblings are neighbours, all in one array."""
    found = _TreeRun()
    for tree in trees:
        value = tree.value.reshape(-1, num_outputs)
        found.add(tree.children_left, tree.children_right, tree.feature, tree.threshold, value, int(tree.max_depth))
    return found.head()


def flatten_boosting(models: Sequence[Any]) -> ForestHead | None:
    """Flatten gradient-boosted trees of several outputs; None when no output has any.

    Parameters
    ----------
    models : fitted ``HistGradientBoostingRegressor`` per output, None where one has none; no missing values, no
        categories

    Returns
    -------
    ForestHead whose ``value`` holds each tree's part of its own output, 0 elsewhere; parts are to be added up
    """
    found = _TreeRun()
    for output, model in enumerate(models):
        if model is None:
            continue
        constant = float(np.ravel(model._baseline_prediction)[0])
        for place, (tree,) in enumerate(model._predictors):
            nodes = tree.nodes
            value = np.zeros((len(nodes), len(models)))
            # The constant rides on the first tree.
            value[:, output] = nodes["value"] + (constant if place == 0 else 0.0)
            left = np.where(nodes["is_leaf"], -1, nodes["left"].astype(np.int64))
            right, depth = nodes["right"].astype(np.int64), int(nodes["depth"].max())
            found.add(left, right, nodes["feature_idx"], nodes["num_threshold"], value, depth)
    return found.head() if found.roots else None


class _TreeRun:
    """Lays trees end to end, each renumbered so that siblings are neighbours."""

    def __init__(self) -> None:
        self.roots: list[int] = []
        self._parts: list[tuple[Any, ...]] = []
        self._num_nodes, self._depth = 0, 0

    def add(self, left: Any, right: Any, feature: Any, threshold: Any, value: Floats, depth: int) -> None:
        """Append one tree: its nodes in any order, -1 for the left child of a leaf."""
        order, child = _sibling_order(left, right)
        is_leaf = left[order] < 0
        bounds = np.where(is_leaf, np.inf, _floor32(threshold[order]))
        self._parts.append((child + self._num_nodes, np.where(is_leaf, 0, feature[order]), bounds, value[order]))
        self.roots.append(self._num_nodes)
        self._num_nodes += len(order)
        self._depth = max(self._depth, depth)

    def head(self) -> ForestHead:
        """Return all trees as one head."""
        child, feature, threshold, value = (np.concatenate(each) for each in zip(*self._parts, strict=True))
        return ForestHead(
            np.array(self.roots, dtype=np.intp),
            child.astype(np.intp),
            feature.astype(np.intp),
            threshold.astype(np.float32),
            value.astype(np.float16),
            self._depth,
        )


def _sibling_order(left: NDArray[np.int64], right: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes in breadth-first order, and the new number of each one's left child (its own for a leaf)."""
    order, child = [0], []
    for position, node in enumerate(order):  # grows while it is walked
        if left[node] < 0:
            child.append(position)
        else:
            child.append(len(order))
            order.extend((int(left[node]), int(right[node])))
    return np.array(order, dtype=np.int64), np.array(child, dtype=np.int64)


def _floor32(thresholds: Floats) -> NDArray[np.float32]:
    """Round thresholds down to float32: float32 features then fall on the same side as under float64."""
    nearest = thresholds.astype(np.float32)
    return np.where(nearest > thresholds, np.nextafter(nearest, np.float32(-np.inf)), nearest).astype(np.float32)


def forest_logits(head: ForestHead, features: NDArray[np.float32]) -> Floats:
    """Return :meth:`ForestHead.logits` of many rows, float64 (n, num_outputs), in blocks that fit the caches."""
    blocks = [head.logits(features[start : start + _FOREST_ROWS]) for start in range(0, len(features), _FOREST_ROWS)]
    return np.concatenate(blocks) if blocks else np.empty((0, head.value.shape[1]))


def fit_calibrator(logits: Floats, target: Floats, weights: Floats, folds: NDArray[np.int64]) -> Calibrator:
    """Fit Platt or isotonic, whichever has less log-loss on folds left out; Platt when one class is missing.

    Parameters
    ----------
    logits : float64 (n,), made by models that had not seen the row
    target : float64 (n,), NaN where unknown
    weights, folds : (n,)
    """
    known = ~np.isnan(target)
    z, y, w, f = logits[known], target[known], weights[known], folds[known]
    if len(y) == 0 or y.min() > 0.5 or y.max() < 0.5:
        prior = prior_logit(target, weights)
        return Calibrator(0.0, prior, np.empty(0), np.empty(0))
    losses = {fit.__name__: _held_out_loss(fit, z, y, w, f) for fit in (_fit_platt, _fit_isotonic)}
    return _fit_isotonic(z, y, w) if losses["_fit_isotonic"] < losses["_fit_platt"] else _fit_platt(z, y, w)


def _held_out_loss(fit: Any, z: Floats, y: Floats, w: Floats, folds: NDArray[np.int64]) -> float:
    held_out = np.empty(len(z))
    for fold in np.unique(folds):
        inside = folds != fold
        if not inside.any() or y[inside].min() > 0.5 or y[inside].max() < 0.5:
            return float("inf")
        held_out[~inside] = fit(z[inside], y[inside], w[inside])(z[~inside])
    return log_loss(held_out, y)


def _fit_platt(z: Floats, y: Floats, w: Floats) -> Calibrator:
    rows, classes, shares = _soft_rows(y, w)
    # Platt's prior of one row a class is the L2 penalty's part; C large leaves a slope that is never negative here.
    model = LogisticRegression(C=10.0).fit(z[rows, None], classes, sample_weight=shares / shares.mean())
    return Calibrator(max(float(model.coef_[0, 0]), 0.0), float(model.intercept_[0]), np.empty(0), np.empty(0))


def _fit_isotonic(z: Floats, y: Floats, w: Floats) -> Calibrator:
    floor = 0.5 / (len(y) + 1)
    model = IsotonicRegression(y_min=floor, y_max=1 - floor, out_of_bounds="clip").fit(z, y, sample_weight=w)
    return Calibrator(0.0, 0.0, model.X_thresholds_.astype(np.float64), model.y_thresholds_.astype(np.float64))
