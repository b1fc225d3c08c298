"""Turns rows into matrices, under an encoder and a projection fitted on one part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.encoder import EncodedRequests, Encoder, RawRows, append_embedding
from classifier.fitting import fit_forest, fit_linear, fit_projection, linear_logits, sparse_matrix
from classifier.heads import ForestHead, LinearHead, sigmoid
from classifier.novelty import SeenWords, readings
from classifier.options import FitOptions
from classifier.rows import Floats, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRows(Rows):
    """Holds a training table as matrices: raw rows, the embedding block or None, targets and weights."""

    raw: RawRows
    vectors: NDArray[np.float32] | None
    targets: Floats
    weights: Floats


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Holds rows under an encoder and projection fitted on them.

    ``matrix`` (TF-IDF CSR), ``dense`` and ``features`` (what the forest reads) are those of the rows themselves.
    """

    rows: LabelledRows
    encoder: Encoder
    projection: NDArray[np.float32]
    component_scale: NDArray[np.float32]
    matrix: Any
    dense: NDArray[np.float32]
    features: NDArray[np.float32]

    @classmethod
    def fit(cls, rows: LabelledRows, options: FitOptions, seed: int) -> EncodedRows:
        encoder = Encoder.fit(rows.raw, options.hashing)
        encoded = encoder.encode(rows.raw)
        matrix = sparse_matrix(encoded.sparse, options.hashing.num_buckets)
        # Stored in half precision; rounded here so that training sees what serving will.
        projection = fit_projection(matrix, options.num_components, seed).astype(np.float16).astype(np.float32)
        projected = np.asarray(matrix @ projection)
        spread = projected.std(axis=0)
        # A direction that never varied is silenced, not blown up.
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-9).astype(np.float32)
        dense = _dense_block(encoded, rows.vectors)
        features = np.hstack([dense, projected * scale]).astype(np.float32)
        return cls(rows, encoder, projection, scale, matrix, dense, features)

    def matrices(self, rows: LabelledRows) -> tuple[Any, NDArray[np.float32], NDArray[np.float32]]:
        """Return TF-IDF CSR, dense block, and the forest's features of some rows."""
        encoded = self.encoder.encode(rows.raw)
        matrix = sparse_matrix(encoded.sparse, self.encoder.config.num_buckets)
        dense = _dense_block(encoded, rows.vectors)
        projected = np.asarray(matrix @ self.projection) * self.component_scale
        return matrix, dense, np.hstack([dense, projected]).astype(np.float32)

    def linear(self, c: float) -> LinearHead:
        return fit_linear(self.matrix, self.dense, self.rows.targets, self.rows.weights, c)

    def forest(self, options: FitOptions, c: float, seed: int) -> ForestHead:
        """Fit the forest; outcomes nobody observed are filled with the linear model's estimate."""
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

    def readings(self, rows: LabelledRows) -> Floats:
        encoded = self.encoder.encode(rows.raw)
        projected = sparse_matrix(encoded.sparse, self.encoder.config.num_buckets) @ self.projection
        return readings(SeenWords.fit(self.rows.raw), rows.raw, encoded, np.asarray(projected))


def _dense_block(encoded: EncodedRequests, vectors: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return dense rows float32 (n, num_dense), each with its embedding behind it where there is one."""
    return encoded.dense if vectors is None else append_embedding(encoded.dense, vectors)
