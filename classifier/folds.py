"""Splits rows and keeps near-duplicates together: what a fit has seen never judges it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from classifier.errors import TrainingError
from classifier.rows import Ints


def group_folds(groups: Ints, num_folds: int, seed: int) -> Ints:
    """Deal whole groups to folds at random, the fullest first, each to the emptiest fold.

    Returns
    -------
    int64 (n,), numbers from 0; fewer folds where there are fewer groups

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


def fold_splits(folds: Ints, groups: Ints | None = None) -> Iterator[tuple[Ints, Ints]]:
    """Yield, fold by fold, the row numbers outside it, to fit on, and those inside, to judge by.

    Parameters
    ----------
    folds : int64 (n,)
    groups : int64 (n,), where folds may split groups: what shares one with the fold is not fitted on
    """
    for fold in np.unique(folds):
        is_inside = folds == fold
        is_kin = is_inside if groups is None else np.isin(groups, groups[is_inside])
        yield np.flatnonzero(~is_kin), np.flatnonzero(is_inside)
