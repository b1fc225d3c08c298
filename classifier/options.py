"""Declares sizes and strengths of a fit, which are kept in the artifact it makes."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.hashing import HashConfig


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Says how a router is fitted.

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
