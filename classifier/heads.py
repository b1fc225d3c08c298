"""Evaluates fitted estimators, which are plain arrays, with numpy alone.

Both heads map encoded requests to one logit per output; the outputs share every feature, so errors common to two
tiers cancel in their difference, and the difference is what a decision rests on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
