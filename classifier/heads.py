"""Evaluates fitted estimators, which are plain arrays, with numpy alone.

Both heads map encoded requests to one logit per output; the outputs share every feature, so errors common to two
tiers cancel in their difference, and the difference is what a decision rests on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.rows import Floats

MAX_LOGIT = 6.0
"""No estimate is taken to be surer than this (0.25 %), however pure a leaf was."""

MAX_TREE_DEPTH = 64
"""Deeper trees are not read from a file: every request walks as many steps."""


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logistic function, safe at both ends."""
    return 1 / (1 + np.exp(np.minimum(-logits, 60.0)))


def bounded_logit(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-odds, held within ``MAX_LOGIT``."""
    low = 1 / (1 + np.exp(MAX_LOGIT))
    # numpy.clip, without the third of its time that goes into argument handling.
    p = np.minimum(np.maximum(probabilities, low), 1 - low)
    log_odds: NDArray[np.float64] = np.log(p) - np.log1p(-p)
    return log_odds


@dataclass(frozen=True, slots=True)
class LinearHead:
    """Holds logistic regressions side by side.

    Attributes
    ----------
    sparse : float32 (num_buckets, num_outputs), weights of the TF-IDF row
    dense : float32 (num_dense, num_outputs), weights of the dense row
    bias : float32 (num_outputs,)
    """

    sparse: NDArray[np.float32]
    dense: NDArray[np.float32]
    bias: NDArray[np.float32]

    def logits(self, dense: NDArray[np.float32], summed: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return log-odds of requests, float64 (n, num_outputs).

        Parameters
        ----------
        dense : float32 (n, num_dense)
        summed : float32 (n, num_outputs), their TF-IDF rows times ``sparse``
        """
        # As a stack of single rows: how one large product is rounded would depend on how many they are.
        total = summed + np.matmul(dense[:, None, :], self.dense)[:, 0] + self.bias
        bounded: NDArray[np.float64] = np.minimum(np.maximum(total.astype(np.float64), -MAX_LOGIT), MAX_LOGIT)
        return bounded


@dataclass(frozen=True, slots=True)
class ForestHead:
    """Holds a forest whose trees all outputs share.

    Nodes of all trees lie in one array, siblings side by side: from node i the walk goes to ``child[i]`` when
    ``x[feature[i]] <= threshold[i]`` and to ``child[i] + 1`` otherwise. A leaf is its own child under an infinite
    threshold, so all trees walk the same number of steps and the walk needs no branch.

    Attributes
    ----------
    roots : intp (num_trees,), the index type numpy takes without converting
    child, feature : intp (num_nodes,)
    threshold : float32 (num_nodes,)
    value : float16 (num_nodes, num_outputs), mean outcome of the training rows in a node
    depth : steps from a root to the deepest leaf
    """

    roots: NDArray[np.intp]
    child: NDArray[np.intp]
    feature: NDArray[np.intp]
    threshold: NDArray[np.float32]
    value: NDArray[np.float16]
    depth: int

    def check(self, num_features: int, num_outputs: int) -> None:
        """Raise ValueError where the arrays do not fit together: else only the request that walks there would fail."""
        nodes = self.child.size
        shapes = [self.child.shape, self.feature.shape, self.threshold.shape, self.value.shape]
        if shapes != [(nodes,), (nodes,), (nodes,), (nodes, num_outputs)]:
            raise ValueError(f"the trees' arrays have shapes {shapes}, expected {nodes} nodes of {num_outputs} outputs")
        places = np.concatenate([self.child, self.child + np.isfinite(self.threshold), self.roots])
        if not self.roots.size or places.min() < 0 or places.max() >= nodes:
            raise ValueError("a tree leaves its array")
        if self.feature.max() >= num_features or self.feature.min() < 0 or not 0 <= self.depth <= MAX_TREE_DEPTH:
            raise ValueError("a tree reads a feature that does not exist, or is too deep")

    def leaves(self, x: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return each tree's leaf for each request, intp (n, num_trees), of features float32 (n, num_features)."""
        flat = np.ascontiguousarray(x).ravel()
        starts = np.arange(0, x.size, x.shape[1])[:, None]
        node = np.broadcast_to(self.roots, (len(x), len(self.roots)))
        for _ in range(self.depth):
            place = self.feature.take(node)
            if len(x) > 1:
                place += starts
            further = flat.take(place) > self.threshold.take(node)
            node = self.child.take(node)
            node += further
        return node

    def sums(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return what the trees say of each request, added up, float64 (n, num_outputs)."""
        found: NDArray[np.float64] = np.add.reduce(self.value.take(self.leaves(x), axis=0), axis=1, dtype=np.float64)
        return found

    def logits(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the log-odds of the trees' mean, float64 (n, num_outputs)."""
        return bounded_logit(self.sums(x) / len(self.roots))


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Maps one output: ``sigmoid(slope * z + intercept)``, or straight lines between knots where there are any.

    Attributes
    ----------
    slope, intercept : Platt's two parameters
    x, y : float64 (k,), isotonic knots, both non-decreasing; empty when Platt's map is used
    """

    slope: float
    intercept: float
    x: Floats
    y: Floats

    @property
    def kind(self) -> str:
        """Return ``platt`` or ``isotonic``."""
        return "isotonic" if len(self.x) else "platt"

    def __call__(self, logits: Floats) -> Floats:
        """Return calibrated probabilities, the shape of ``logits``."""
        if len(self.x):
            return np.interp(logits, self.x, self.y)
        return sigmoid(self.slope * logits + self.intercept)


@dataclass(frozen=True, slots=True)
class CalibratorBank:
    """Holds all outputs' calibrators as four arrays, as an artifact stores them.

    Attributes
    ----------
    platt : float64 (num_outputs, 2), slope and intercept
    offsets : int64 (num_outputs + 1,), output o owns knots ``offsets[o]:offsets[o + 1]``
    x, y : float64 (num_knots,)
    """

    platt: Floats
    offsets: NDArray[np.int64]
    x: Floats
    y: Floats

    @classmethod
    def pack(cls, calibrators: list[Calibrator]) -> CalibratorBank:
        """Lay calibrators end to end."""
        offsets = np.concatenate([[0], np.cumsum([len(c.x) for c in calibrators])]).astype(np.int64)
        platt = np.array([[c.slope, c.intercept] for c in calibrators], dtype=np.float64)
        x = np.concatenate([c.x for c in calibrators])
        return cls(platt, offsets, x, np.concatenate([c.y for c in calibrators]))

    def __call__(self, logits: Floats) -> Floats:
        """Return calibrated probabilities of requests, float64 (n, num_outputs), as their log-odds."""
        p = sigmoid(self.platt[:, 0] * logits + self.platt[:, 1])
        for output in (self.offsets[1:] > self.offsets[:-1]).nonzero()[0].tolist():
            knots = slice(self.offsets[output], self.offsets[output + 1])
            p[:, output] = np.interp(logits[:, output], self.x[knots], self.y[knots])
        return p

    def check(self) -> None:
        """Raise ValueError where an output's knots lie outside the arrays, or out of order."""
        ends = self.offsets
        if ends[0] != 0 or (np.diff(ends) < 0).any() or ends[-1] != len(self.x) or self.x.shape != self.y.shape:
            raise ValueError("a calibration's knots lie outside its arrays")
        # Knots rise within an output, and begin anew with the next.
        within = np.ones(max(len(self.x) - 1, 0), dtype=np.bool_)
        within[[end - 1 for end in ends[1:-1].tolist() if 0 < end < len(self.x)]] = False
        if (np.diff(self.x)[within] < 0).any() or self.y.min(initial=0.0) < 0 or self.y.max(initial=1.0) > 1:
            raise ValueError("a calibration's knots are out of order, or no probabilities")
