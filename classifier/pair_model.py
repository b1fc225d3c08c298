"""What a pair of models gains from the strong one, request by request: an ensemble fitted on graded pairs.

Five views of a prompt vote: logistic regressions on words and shape, ridge on words and characters, trees on directions
of the training set, neighbours, and the gain of the subject it seems to belong to. Each votes with the weight it earned
on left-out groups. This is the offline instrument behind ``suffice evaluate``; what serves is :mod:`classifier.router`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from classifier.errors import TrainingError
from classifier.pair_rows import Floats, Ints, PairEncoder, PairRows, Views

MIN_ROWS = 30
NUM_NEIGHBOURS = 60
_SHAPE_WEIGHT = 0.3
_HELD_SHARE = 0.2
FOREIGN_QUANTILE = 0.05
"""Share of familiar prompts that the guard takes for foreign."""


class PairModel:
    """Estimates of the gain of the strong answer over the weak one.

    Parameters
    ----------
    rows : graded pairs
    seed : of the left-out part and the trees

    Attributes
    ----------
    weights : weight of each view's vote
    least_similarity : to the nearest training prompt; what is below it is foreign

    Raises
    ------
    TrainingError
        Fewer than ``MIN_ROWS`` rows or two groups.
    """

    def __init__(self, rows: PairRows, *, seed: int) -> None:
        if len(rows) < MIN_ROWS or len(np.unique(rows.groups)) < 2:
            raise TrainingError(f"{len(rows)} graded pairs cannot carry a fit; {MIN_ROWS} in two groups are needed.")
        held = _held_out(rows.groups, seed)
        first = _Voters(rows.take(np.flatnonzero(~held)), seed)
        views = first.encode(rows.take(np.flatnonzero(held)).prompts)
        votes = first.votes(views)
        self.least_similarity = float(np.quantile(first.neighbours(views)[1], FOREIGN_QUANTILE))
        gains = (rows.strong - rows.weak)[held]
        self.weights = {name: _earned(vote, gains) for name, vote in votes.items()}
        self._voters = _Voters(rows, seed)
        self._scales = {name: float(vote.std()) + 1e-9 for name, vote in votes.items()}

    def gains(self, prompts: Sequence[str]) -> tuple[Floats, Floats]:
        """Estimated gain, and similarity to the nearest training prompt (0..1); float64 (n,) each."""
        views = self._voters.encode(prompts)
        votes = self._voters.votes(views)
        total = sum(
            (self.weights[name] * vote / self._scales[name] for name, vote in votes.items()), np.zeros(len(prompts))
        )
        return total, self._voters.neighbours(views)[1]


def _held_out(groups: Ints, seed: int) -> NDArray[np.bool_]:
    """A fifth of the groups, at random."""
    unique, inverse = np.unique(groups, return_inverse=True)
    count = max(int(_HELD_SHARE * len(unique)), 1)
    picked = np.zeros(len(unique), dtype=np.bool_)
    picked[np.random.default_rng(seed).permutation(len(unique))[:count]] = True
    held: NDArray[np.bool_] = picked[inverse]
    return held


def _earned(vote: Floats, gains: Floats) -> float:
    """Squared correlation with what was gained, none for a negative one; a little for all, so that none is noise."""
    if vote.std() < 1e-12 or gains.std() < 1e-12:
        return 0.0
    return max(float(np.corrcoef(vote, gains)[0, 1]), 0.01) ** 2


class _Voters:
    """Every view's estimator, fitted on the same rows."""

    def __init__(self, rows: PairRows, seed: int) -> None:
        from sklearn.ensemble import ExtraTreesRegressor
        from sklearn.linear_model import Ridge

        self.encode = PairEncoder(rows.prompts, seed)
        views = self.encode(rows.prompts)
        self._gains = rows.strong - rows.weak
        self._known = views.everything
        self._logistic = [_logistic(_beside(views.words, views), y) for y in (rows.weak, rows.strong)]
        self._ridge = Ridge(alpha=10.0, solver="sparse_cg", tol=1e-3).fit(_beside(views.everything, views), self._gains)
        trees = ExtraTreesRegressor(100, min_samples_leaf=8, max_features=0.3, random_state=seed)
        self._trees = trees.fit(views.compact, np.column_stack([rows.weak, rows.strong]))
        self._subjects = _Subjects(views, rows) if len(set(rows.domains)) > 1 else None

    def votes(self, views: Views) -> dict[str, Floats]:
        """Estimated gain by each view, float64 (n,)."""
        low, high = (each(_beside(views.words, views)) for each in self._logistic)
        trees = self._trees.predict(views.compact)
        found = {
            "logistic": high - low,
            "ridge": self._ridge.predict(_beside(views.everything, views)),
            "trees": trees[:, 1] - trees[:, 0],
            "neighbours": self.neighbours(views)[0],
        }
        if self._subjects is not None:
            found["subjects"] = self._subjects.gains(views)
        return found

    def neighbours(self, views: Views) -> tuple[Floats, Floats]:
        """Gain among the nearest training prompts, and similarity to the very nearest (0..1)."""
        num_rows, count = views.everything.shape[0], min(NUM_NEIGHBOURS, self._known.shape[0] - 1)
        gains, nearest = np.zeros(num_rows), np.zeros(num_rows)
        for start in range(0, num_rows, 512):  # a block of similarities at a time, to bound the memory
            block = (views.everything[start : start + 512] @ self._known.T).toarray()
            picked = np.argpartition(-block, count, axis=1)[:, :count]
            weights = np.take_along_axis(block, picked, axis=1) ** 2 + 1e-12
            gains[start : start + 512] = (weights * self._gains[picked]).sum(axis=1) / weights.sum(axis=1)
            # Words and characters are normed apart: two views of length one.
            nearest[start : start + 512] = block.max(axis=1) / 2
        return gains, nearest


class _Subjects:
    """Mean gain of the subject a prompt seems to belong to."""

    def __init__(self, views: Views, rows: PairRows) -> None:
        from sklearn.linear_model import LogisticRegression

        labels, inverse = np.unique(rows.domains, return_inverse=True)
        self._model = LogisticRegression(C=0.1, max_iter=40, tol=1e-2).fit(views.compact, inverse)
        gains = np.bincount(inverse, weights=rows.strong - rows.weak) + 10 * float((rows.strong - rows.weak).mean())
        self._means = (gains / (np.bincount(inverse) + 10))[self._model.classes_]
        assert len(self._means) == len(labels)

    def gains(self, views: Views) -> Floats:
        found: Floats = self._model.predict_proba(views.compact) @ self._means
        return found


def _logistic(matrix: object, grades: Floats) -> Callable[[object], Floats]:
    """P(grade above a half); a constant where all are on one side."""
    from sklearn.linear_model import LogisticRegression

    right = grades > 0.5
    if right.all() or not right.any():
        share = float(right.mean())
        return lambda rows: np.full(rows.shape[0], share)  # type: ignore[attr-defined]
    fitted = LogisticRegression(C=1.0, solver="liblinear", tol=1e-2).fit(matrix, right)
    return lambda rows: np.asarray(fitted.predict_proba(rows)[:, 1], dtype=np.float64)


def _beside(matrix: object, views: Views) -> object:
    from scipy.sparse import csr_matrix, hstack

    return hstack([matrix, csr_matrix(_SHAPE_WEIGHT * views.shape)]).tocsr()
