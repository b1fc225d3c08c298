"""Makes a router of a table of outcomes: encode, fit, calibrate on rows left out, judge, freeze.

Everything that is reported about a router, and every number a policy derives from it, comes from rows its estimators
had not seen: K group-safe folds are fitted first, calibration rests on their left-out estimates, and only then one
final fit sees all rows. Same table, same options, same seed: same artifact, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.artifact import RouterArtifact
from classifier.embedding import Embedder
from classifier.encoded_rows import EncodedRows, LabelledRows
from classifier.encoder import RawRows, read_requests
from classifier.features import feature_names
from classifier.fitting import fit_calibrator, forest_logits, linear_logits
from classifier.folds import fold_splits, group_folds
from classifier.heads import Calibrator, CalibratorBank, sigmoid
from classifier.metrics import log_loss
from classifier.novelty import NoveltyScale, SeenWords
from classifier.options import FitOptions
from classifier.router import Estimator, cohere
from classifier.rows import Floats
from classifier.table import TrainingTable

_FOREST_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_READ_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class FittedRouter:
    """Holds a router and the estimates it was calibrated and judged on.

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


def fit_router(
    table: TrainingTable,
    *,
    seed: int,
    options: FitOptions | None = None,
    embedder: Embedder | None = None,
    folds: NDArray[np.int64] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> FittedRouter:
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
    # Of tools nothing is learnt where no request has any, and no request then pays for reading them.
    has_tools = any(request.tools for request in table.requests)
    raw = RawRows.join(
        [
            read_requests(
                table.requests[start : start + _READ_TOGETHER], table.num_tiers, options.hashing, reads_tools=has_tools
            )
            for start in range(0, len(table.requests), _READ_TOGETHER)
        ]
    )
    rows = LabelledRows(raw=raw, vectors=vectors, targets=table.targets(), weights=table.weights)
    linear, forest, held_out_readings, c = _left_out(rows, folds, options, seed)
    weight = _best_forest_weight(linear, forest, rows)
    mixed = weight * forest + (1 - weight) * linear
    calibrators = [
        fit_calibrator(mixed[:, o], rows.targets[:, o], rows.weights, folds) for o in range(rows.targets.shape[1])
    ]
    right, good = _cross_calibrated(mixed, rows, folds, table)
    estimator = _fit_estimator(rows, options, c, seed, weight)
    # On rows left out: to itself every row is familiar.
    scale = NoveltyScale.fit(held_out_readings if table.typical is None else held_out_readings[table.typical])
    arrays = _arrays(estimator, calibrators, SeenWords.fit(raw), scale) | dict(embedder.arrays if embedder else {})
    names = feature_names(table.num_tiers, reads_tools=has_tools)
    described = _metadata(table, names, options, estimator, calibrators, scale, embedder, vectors, seed, c)
    return FittedRouter(RouterArtifact.create(arrays, {**described, **(metadata or {})}), right, good, folds)


def _left_out(
    rows: LabelledRows, folds: NDArray[np.int64], options: FitOptions, seed: int
) -> tuple[Floats, Floats, Floats, float]:
    """Return left-out log-odds of both heads and novelty readings; and the L2 strength with the least left-out loss."""
    shape = rows.targets.shape
    candidates = {c: np.empty(shape) for c in options.linear_c}
    forest, held_out = np.empty(shape), np.empty((shape[0], 4))
    for inside, outside in fold_splits(folds):
        fit, judge = EncodedRows.fit(rows.take(inside), options, seed), rows.take(outside)
        matrix, dense, features = fit.matrices(judge)
        for c, logits in candidates.items():
            logits[outside] = linear_logits(fit.linear(c), matrix, dense)
        # The forest sees the linear model only where outcomes are missing, so one strength will do for all candidates.
        forest[outside] = forest_logits(fit.forest(options, options.linear_c[0], seed), features)
        held_out[outside] = fit.readings(judge)
    losses = {c: _loss(logits, rows) for c, logits in candidates.items()}
    best = min(losses, key=losses.__getitem__)
    return candidates[best], forest, held_out, best


def _loss(logits: Floats, rows: LabelledRows) -> float:
    known = ~np.isnan(rows.targets)
    return log_loss(sigmoid(logits[known]), rows.targets[known])


def _best_forest_weight(linear: Floats, forest: Floats, rows: LabelledRows) -> float:
    """Choose one weight for all outputs, so that what two tiers share stays shared."""
    return min(_FOREST_WEIGHTS, key=lambda w: _loss(w * forest + (1 - w) * linear, rows))


def _cross_calibrated(
    mixed: Floats, rows: LabelledRows, folds: NDArray[np.int64], table: TrainingTable
) -> tuple[Floats, Floats]:
    """Return estimates whose calibration, too, had not seen the row: p_right and p_as_good, float64 (n, num_tiers)."""
    calibrated = np.empty(mixed.shape)
    for inside, outside in fold_splits(folds):
        for o in range(mixed.shape[1]):
            fit = fit_calibrator(mixed[inside, o], rows.targets[inside, o], rows.weights[inside], folds[inside])
            calibrated[outside, o] = fit(mixed[outside, o])
    right = calibrated[:, : table.num_tiers]
    good = np.hstack([calibrated[:, table.num_tiers :], np.ones((len(mixed), 1))])
    return right, cohere(right, good) if table.is_binary else good


def _fit_estimator(rows: LabelledRows, options: FitOptions, c: float, seed: int, weight: float) -> Estimator:
    fit = EncodedRows.fit(rows, options, seed)
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
        "forest_roots": estimator.forest.roots.astype(np.int32),
        "forest_child": estimator.forest.child.astype(np.int32),
        "forest_feature": estimator.forest.feature.astype(np.int32),
        "forest_threshold": estimator.forest.threshold,
        "forest_value": estimator.forest.value,
        "calibration_platt": bank.platt,
        "calibration_offsets": bank.offsets,
        "calibration_x": bank.x,
        "calibration_y": bank.y,
        "seen_words": np.packbits(seen.words),
        "seen_pairs": np.packbits(seen.pairs),
        "seen_prompts": seen.prompts,
        "novelty_grids": scale.grids,
        "novelty_combined": scale.combined,
    }


def _metadata(
    table: TrainingTable,
    names: Sequence[str],
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
        "features": list(names),
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
