"""The plain heads give what the scikit-learn estimators they were made from give."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.linear_model import LogisticRegression

from classifier.fitting import (
    DENSE_SHRINK,
    fit_calibrator,
    fit_forest,
    fit_linear,
    flatten_forest,
    forest_logits,
    linear_logits,
    prior_logit,
    sparse_matrix,
)
from classifier.hashing import SparseRows
from classifier.heads import MAX_LOGIT, CalibratorBank, bounded_logit, sigmoid

RNG = np.random.default_rng(7)


def random_rows(n: int, num_buckets: int = 64, num_dense: int = 5) -> tuple[SparseRows, np.ndarray]:
    rows = []
    for _ in range(n):
        buckets = np.sort(RNG.choice(num_buckets, size=int(RNG.integers(1, 20)), replace=False))
        bounds = np.array([0, len(buckets) // 2, len(buckets)])
        rows.append(SparseRows(buckets, RNG.random(len(buckets)).astype(np.float32), bounds))
    return SparseRows.join(rows), RNG.normal(size=(n, num_dense)).astype(np.float32)


def test_linear_head_is_logistic_regression() -> None:
    rows, dense = random_rows(300)
    matrix = sparse_matrix(rows, 64)
    target = (dense[:, 0] + 0.5 * RNG.normal(size=300) > 0).astype(np.float64)
    head = fit_linear(matrix, dense, target[:, None], np.ones(300), c=1.0)
    features = sparse.hstack([matrix, sparse.csr_matrix(dense * DENSE_SHRINK)]).tocsr()
    reference = LogisticRegression(C=1.0, max_iter=1000).fit(features, target).predict_proba(features)[:, 1]
    together = sigmoid(linear_logits(head, matrix, dense))[:, 0]
    served = head.logits(dense, rows.dot(head.sparse))
    alone = [head.logits(dense[i : i + 1], rows.take([i]).dot(head.sparse)) for i in range(len(rows))]
    assert (np.concatenate(alone) == served).all()
    assert together == pytest.approx(reference, abs=2e-3)  # sparse weights are kept in half precision
    assert sigmoid(served)[:, 0] == pytest.approx(together, abs=1e-6)


@pytest.mark.parametrize("integer_features", [False, True])
def test_forest_head_is_the_forest(integer_features: bool) -> None:
    x = RNG.integers(0, 4, size=(400, 6)) if integer_features else RNG.normal(size=(400, 6))
    x = x.astype(np.float32)
    y = (np.stack([x[:, 0] + x[:, 1], x[:, 1] - x[:, 2]], axis=1) > 0.5).astype(np.float64)
    model = ExtraTreesRegressor(20, max_leaf_nodes=40, random_state=0).fit(x, y)
    head = flatten_forest([each.tree_ for each in model.estimators_], 2)
    # Values at the split points themselves decide whether rounding thresholds to float32 moved anything.
    edges = np.tile(head.threshold[np.isfinite(head.threshold)][:400, None], (1, 6)).astype(np.float32)
    for features in (x, RNG.normal(size=(200, 6)).astype(np.float32), edges):
        expected = bounded_logit(model.predict(features))
        together = forest_logits(head, features)
        assert sigmoid(together) == pytest.approx(sigmoid(expected), abs=1e-3)  # half precision leaves
        alone = np.concatenate([head.logits(row[None]) for row in features])
        assert (alone == together).all()
        leaves = head.leaves(features)
        assert (head.child[leaves] == leaves).all()


def test_half_right_answers_pull_to_the_middle() -> None:
    rows, dense = random_rows(200)
    matrix = sparse_matrix(rows, 64)
    head = fit_linear(matrix, dense, np.full((200, 1), 0.5), np.ones(200), c=0.1)
    assert sigmoid(linear_logits(head, matrix, dense)) == pytest.approx(0.5, abs=0.02)


def test_an_output_of_one_class_gets_its_prior() -> None:
    rows, dense = random_rows(50)
    matrix = sparse_matrix(rows, 64)
    targets = np.stack([np.ones(50), np.full(50, np.nan)], axis=1)
    p = sigmoid(linear_logits(fit_linear(matrix, dense, targets, np.ones(50), c=1.0), matrix, dense))
    assert p[:, 0] == pytest.approx(50.5 / 51, abs=1e-6)
    assert p[:, 1] == pytest.approx(0.5)
    assert prior_logit(np.zeros(10**6), np.ones(10**6)) == -MAX_LOGIT


def test_forest_weights_count() -> None:
    x = np.zeros((100, 1), dtype=np.float32)
    y = np.tile(np.r_[np.ones(50), np.zeros(50)][:, None], (1, 2))
    weights = np.r_[np.full(50, 3.0), np.ones(50)]
    head = fit_forest(x, y, weights, num_trees=3, max_leaves=8, min_leaf=1, seed=0)
    assert sigmoid(head.logits(x[:1])) == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize(("distortion", "kind"), [("none", "platt"), ("bent", "isotonic")])
def test_calibration_undoes_a_distortion(distortion: str, kind: str) -> None:
    z = RNG.normal(scale=2.0, size=8000)
    truth = sigmoid(z) if distortion == "none" else np.where(z > 0, 0.9, 0.2 + 0.05 * np.sin(z))
    y = (RNG.random(8000) < truth).astype(np.float64)
    calibrate = fit_calibrator(3 * z + 1, y, np.ones(8000), np.arange(8000) % 5)
    assert calibrate.kind == kind
    assert np.abs(calibrate(3 * z + 1) - truth).mean() < 0.03
    bank = CalibratorBank.pack([calibrate, calibrate])
    bank.check()
    assert bank(np.stack([z, -z], axis=1)) == pytest.approx(np.stack([calibrate(z), calibrate(-z)], axis=1))
    grid = calibrate(np.linspace(-30, 30, 500))
    assert (np.diff(grid) >= -1e-12).all()
    assert 0 < grid[0] < grid[-1] < 1
