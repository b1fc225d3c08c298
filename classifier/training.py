"""From a table of outcomes to a router: encode, fit, calibrate on rows left out, judge, freeze.

Everything that is reported about a router, and every number a policy derives from it, comes from rows its estimators
had not seen: K group-safe folds are fitted first, calibration rests on their left-out estimates, and only then one
final fit sees all rows. Same table, same options, same seed: same artifact, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.artifact import RouterArtifact
from classifier.calibration import Calibrator, CalibratorBank
from classifier.embedding import Embedder
from classifier.encoder import EncodedRow, Encoder, RawRow, append_embedding, read_request
from classifier.errors import TrainingError
from classifier.features import feature_names
from classifier.fitting import (
    fit_calibrator,
    fit_forest,
    fit_linear,
    fit_projection,
    forest_logits,
    linear_logits,
    sparse_matrix,
)
from classifier.hashing import HashConfig
from classifier.heads import ForestHead, LinearHead, sigmoid
from classifier.metrics import log_loss
from classifier.novelty import NoveltyScale, SeenWords, readings
from classifier.router import Estimator, cohere
from classifier.table import TrainingTable

Floats = NDArray[np.float64]
_FOREST_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a router is fitted.

    Parameters
    ----------
    hashing : schema of the n-grams
    num_components : directions of the training subspace that the forest and the novelty reading see
    linear_c : inverse L2 strengths to choose from, by log-loss on left-out rows
    num_trees, max_leaves, min_leaf : size of the forest
    num_folds : folds for calibration and metrics
    """

    hashing: HashConfig = field(default_factory=HashConfig)
    num_components: int = 24
    linear_c: tuple[float, ...] = (1.0, 8.0, 32.0)
    num_trees: int = 64
    max_leaves: int = 256
    min_leaf: int = 5
    num_folds: int = 5


@dataclass(frozen=True, slots=True)
class Fitted:
    """A router and the estimates it was calibrated and judged on.

    Attributes
    ----------
    artifact : the router, fitted on all rows
    p_right, p_as_good : float64 (n, num_tiers), calibrated estimates of models that had not seen the row; use these,
        never the router's own predictions on its training rows, to derive thresholds
    folds : int64 (n,)
    """

    artifact: RouterArtifact
    p_right: Floats
    p_as_good: Floats
    folds: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table as matrices: raw rows, and the embedding block or None."""

    raw: tuple[RawRow, ...]
    vectors: NDArray[np.float32] | None
    targets: Floats
    weights: Floats

    def take(self, rows: NDArray[np.int64]) -> _Rows:
        picked = tuple(self.raw[i] for i in rows)
        vectors = None if self.vectors is None else self.vectors[rows]
        return _Rows(picked, vectors, self.targets[rows], self.weights[rows])


def fit_router(
    table: TrainingTable,
    *,
    seed: int,
    options: FitOptions | None = None,
    embedder: Embedder | None = None,
    folds: NDArray[np.int64] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Fitted:
    """Fit, calibrate and freeze a router.

    Parameters
    ----------
    table : requests and outcomes
    seed : of folds, projection and forest
    options : sizes and strengths
    embedder : a sentence-embedding source to add as features; recorded in the artifact
    folds : int64 (n,), fold numbers from 0 to use instead of :func:`group_folds`; they must keep groups whole
    metadata : further JSON-able entries for the artifact's card

    Raises
    ------
    TrainingError
        Too few groups for the folds.
    EmbeddingError
        The embedding source failed.
    """
    options = options or FitOptions()
    folds = group_folds(table.groups, options.num_folds, seed) if folds is None else folds
    vectors = None if embedder is None else embedder.embed(table.requests)
    raw = tuple(read_request(request, table.num_tiers, options.hashing) for request in table.requests)
    rows = _Rows(raw, vectors, table.targets(), table.weights)
    linear, forest, held_out_readings, c = _left_out(rows, folds, options, seed)
    weight = _best_forest_weight(linear, forest, rows)
    mixed = weight * forest + (1 - weight) * linear
    calibrators = [
        fit_calibrator(mixed[:, o], rows.targets[:, o], rows.weights, folds) for o in range(rows.targets.shape[1])
    ]
    right, good = _cross_calibrated(mixed, rows, folds, table)
    estimator = _fit_estimator(rows, options, c, seed, weight)
    scale = NoveltyScale.fit(held_out_readings)
    arrays = _arrays(estimator, calibrators, SeenWords.fit(raw), scale)
    described = _metadata(table, options, estimator, calibrators, scale, embedder, vectors, seed, c)
    return Fitted(RouterArtifact.create(arrays, {**described, **(metadata or {})}), right, good, folds)


def group_folds(groups: NDArray[np.int64], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Fold numbers int64 (n,): whole groups, dealt at random, the fullest first, each to the emptiest fold.

    Raises
    ------
    TrainingError
        Fewer groups than two.
    """
    unique, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    num_folds = min(num_folds, len(unique))
    if num_folds < 2:
        raise TrainingError("All rows are one group of near-duplicates; nothing could be left out to calibrate on.")
    shuffled = np.random.default_rng(seed).permutation(len(unique))
    order = shuffled[np.argsort(-counts[shuffled], kind="stable")]
    sizes = np.zeros(num_folds, dtype=np.int64)
    fold_of = np.empty(len(unique), dtype=np.int64)
    for group in order:
        fold = int(np.argmin(sizes))
        fold_of[group] = fold
        sizes[fold] += counts[group]
    return fold_of[inverse]


def _left_out(
    rows: _Rows, folds: NDArray[np.int64], options: FitOptions, seed: int
) -> tuple[Floats, Floats, Floats, float]:
    """Left-out log-odds of both heads and novelty readings; and the L2 strength with the least left-out loss."""
    shape = rows.targets.shape
    candidates = {c: np.empty(shape) for c in options.linear_c}
    forest, held_out = np.empty(shape), np.empty((shape[0], 4))
    for fold in range(int(folds.max()) + 1):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        fit, judge = _Encoded.fit(rows.take(inside), options, seed), rows.take(outside)
        matrix, dense, features = fit.matrices(judge)
        for c, logits in candidates.items():
            logits[outside] = linear_logits(fit.linear(c), matrix, dense)
        forest[outside] = forest_logits(fit.forest(options, options.linear_c[0], seed), features)
        held_out[outside] = fit.readings(judge)
    losses = {c: _loss(logits, rows) for c, logits in candidates.items()}
    best = min(losses, key=losses.__getitem__)
    return candidates[best], forest, held_out, best


def _loss(logits: Floats, rows: _Rows) -> float:
    known = ~np.isnan(rows.targets)
    return log_loss(sigmoid(logits[known]), rows.targets[known])


def _best_forest_weight(linear: Floats, forest: Floats, rows: _Rows) -> float:
    """One weight for all outputs, so that what two tiers share stays shared."""
    return min(_FOREST_WEIGHTS, key=lambda w: _loss(w * forest + (1 - w) * linear, rows))


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Rows under an encoder and projection fitted on them.

    ``matrix`` (TF-IDF CSR), ``dense`` and ``features`` (what the forest reads) are those of the rows themselves.
    """

    rows: _Rows
    encoder: Encoder
    projection: NDArray[np.float32]
    component_scale: NDArray[np.float32]
    matrix: Any
    dense: NDArray[np.float32]
    features: NDArray[np.float32]

    @classmethod
    def fit(cls, rows: _Rows, options: FitOptions, seed: int) -> _Encoded:
        encoder = Encoder.fit(rows.raw, options.hashing)
        encoded = [encoder.encode(raw) for raw in rows.raw]
        matrix = sparse_matrix(encoded, options.hashing.num_buckets)
        # Stored in half precision; rounded here so that training sees what serving will.
        projection = fit_projection(matrix, options.num_components, seed).astype(np.float16).astype(np.float32)
        projected = np.asarray(matrix @ projection)
        spread = projected.std(axis=0)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-9).astype(np.float32)
        dense = _dense_block(encoded, rows.vectors)
        features = np.hstack([dense, projected * scale]).astype(np.float32)
        return cls(rows, encoder, projection, scale, matrix, dense, features)

    def encode(self, rows: _Rows) -> list[EncodedRow]:
        return [self.encoder.encode(raw) for raw in rows.raw]

    def matrices(self, rows: _Rows) -> tuple[Any, NDArray[np.float32], NDArray[np.float32]]:
        """TF-IDF CSR, dense block, and the forest's features of some rows."""
        encoded = self.encode(rows)
        matrix = sparse_matrix(encoded, self.encoder.config.num_buckets)
        dense = _dense_block(encoded, rows.vectors)
        projected = np.asarray(matrix @ self.projection) * self.component_scale
        return matrix, dense, np.hstack([dense, projected]).astype(np.float32)

    def linear(self, c: float) -> LinearHead:
        return fit_linear(self.matrix, self.dense, self.rows.targets, self.rows.weights, c)

    def forest(self, options: FitOptions, c: float, seed: int) -> ForestHead:
        """The forest; outcomes nobody observed are filled with the linear model's estimate."""
        targets = self.rows.targets
        if np.isnan(targets).any():
            filled = sigmoid(linear_logits(self.linear(c), self.matrix, self.dense))
            targets = np.where(np.isnan(targets), filled, targets)
        return fit_forest(
            self.features,
            targets,
            self.rows.weights,
            num_trees=options.num_trees,
            max_leaves=options.max_leaves,
            min_leaf=options.min_leaf,
            seed=seed,
        )

    def readings(self, rows: _Rows) -> Floats:
        seen = SeenWords.fit(self.rows.raw)
        found = []
        for raw, encoded in zip(rows.raw, self.encode(rows), strict=True):
            projected = encoded.sparse.values @ self.projection[encoded.sparse.buckets]
            found.append(readings(seen, raw, encoded, projected))
        return np.stack(found)


def _dense_block(encoded: Sequence[EncodedRow], vectors: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Dense rows float32 (n, num_dense), each with its embedding behind it where there is one."""
    if vectors is None:
        return np.stack([row.dense for row in encoded])
    return np.stack([append_embedding(row.dense, vector) for row, vector in zip(encoded, vectors, strict=True)])


def _cross_calibrated(
    mixed: Floats, rows: _Rows, folds: NDArray[np.int64], table: TrainingTable
) -> tuple[Floats, Floats]:
    """Estimates whose calibration, too, had not seen the row: p_right and p_as_good, float64 (n, num_tiers)."""
    calibrated = np.empty(mixed.shape)
    for fold in range(int(folds.max()) + 1):
        inside, outside = folds != fold, folds == fold
        for o in range(mixed.shape[1]):
            fit = fit_calibrator(mixed[inside, o], rows.targets[inside, o], rows.weights[inside], folds[inside])
            calibrated[outside, o] = fit(mixed[outside, o])
    right = calibrated[:, : table.num_tiers]
    good = np.hstack([calibrated[:, table.num_tiers :], np.ones((len(mixed), 1))])
    return right, cohere(right, good) if table.is_binary else good


def _fit_estimator(rows: _Rows, options: FitOptions, c: float, seed: int, weight: float) -> Estimator:
    fit = _Encoded.fit(rows, options, seed)
    forest = fit.forest(options, c, seed)
    return Estimator(fit.encoder, fit.projection, fit.component_scale, fit.linear(c), forest, weight)


def _arrays(
    estimator: Estimator, calibrators: list[Calibrator], seen: SeenWords, scale: NoveltyScale
) -> dict[str, NDArray[Any]]:
    bank = CalibratorBank.pack(calibrators)
    return {
        "encoder_idf": estimator.encoder.idf,
        "encoder_mean": estimator.encoder.mean,
        "encoder_scale": estimator.encoder.scale,
        "projection": estimator.projection.astype(np.float16),
        "component_scale": estimator.component_scale,
        "linear_sparse": estimator.linear.sparse.astype(np.float16),
        "linear_dense": estimator.linear.dense,
        "linear_bias": estimator.linear.bias,
        "forest_roots": estimator.forest.roots,
        "forest_child": estimator.forest.child,
        "forest_feature": estimator.forest.feature,
        "forest_threshold": estimator.forest.threshold,
        "forest_value": estimator.forest.value,
        "calibration_platt": bank.platt,
        "calibration_offsets": bank.offsets,
        "calibration_x": bank.x,
        "calibration_y": bank.y,
        "seen_words": np.packbits(seen.words),
        "seen_pairs": np.packbits(seen.pairs),
        "novelty_grids": scale.grids,
        "novelty_combined": scale.combined,
    }


def _metadata(
    table: TrainingTable,
    options: FitOptions,
    estimator: Estimator,
    calibrators: list[Calibrator],
    scale: NoveltyScale,
    embedder: Embedder | None,
    vectors: NDArray[np.float32] | None,
    seed: int,
    c: float,
) -> dict[str, Any]:
    return {
        "num_tiers": table.num_tiers,
        "is_binary": table.is_binary,
        "features": list(feature_names(table.num_tiers)),
        "hashing": asdict(options.hashing),
        "embedding": {
            "source": embedder.source if embedder else "none",
            "model": embedder.model if embedder else "",
            "dim": 0 if vectors is None else int(vectors.shape[1]),
        },
        "forest_depth": estimator.forest.depth,
        "forest_weight": estimator.forest_weight,
        "calibration": [calibrator.kind for calibrator in calibrators],
        "novelty": {"num_held_out": scale.num_held_out},
        "training": {
            "window": table.window,
            "label_source": table.label_source,
            "num_rows": len(table.requests),
            "num_groups": len(np.unique(table.groups)),
            "seed": seed,
            "options": asdict(options),
            "linear_c": c,
        },
    }
