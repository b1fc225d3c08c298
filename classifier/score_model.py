"""What each of several models makes of a prompt: estimates from graded prompts, by five views that vote.

The offline instrument behind ``suffice evaluate``; what serves is :mod:`classifier.router`. All models share every
view, so what makes a prompt hard is learnt from all of their grades together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.pair_rows import Floats, Ints, PairEncoder, PromptCounts, Views

NUM_NEIGHBOURS = 60
HELD_SHARE = 0.2
FOREIGN_QUANTILE = 0.05
"""Share of familiar prompts that the guard takes for foreign."""

_SHAPE_WEIGHT = 0.3
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Prompts with the grades of several models.

    Attributes
    ----------
    prompts : n texts
    scores : float64 (n, num_models), 0..1
    groups : int64 (n,), near-duplicates share one
    domains : n labels of the source, a further target in training, never read when predicting
    """

    prompts: tuple[str, ...]
    scores: Floats
    groups: Ints
    domains: tuple[str, ...]

    def take(self, rows: Ints) -> ScoreRows:
        """Some of the rows."""
        domains = tuple(self.domains[i] for i in rows)
        return ScoreRows(tuple(self.prompts[i] for i in rows), self.scores[rows], self.groups[rows], domains)

    def __len__(self) -> int:
        return len(self.prompts)


class Voters:
    """Every view's estimator, fitted on the same rows: logistic regressions on words, ridge on words and characters,
    trees on directions of the training set, neighbours, and the subject a prompt seems to belong to."""

    def __init__(self, rows: ScoreRows, counts: PromptCounts, seed: int) -> None:
        from sklearn.ensemble import ExtraTreesRegressor
        from sklearn.linear_model import Ridge

        self.encode = PairEncoder(rows.prompts, counts, seed)
        views = self.encode(rows.prompts)
        self._scores = rows.scores
        self._known = views.everything
        self._logistic = [_logistic(_beside(views.words, views), grades) for grades in rows.scores.T]
        ridge = Ridge(alpha=10.0, solver="sparse_cg", tol=1e-3)
        self._ridge = ridge.fit(_beside(views.everything, views), rows.scores)
        trees = ExtraTreesRegressor(100, min_samples_leaf=8, max_features=0.3, random_state=seed)
        self._trees = trees.fit(views.compact, rows.scores)
        self._subjects = _Subjects(views, rows) if len(set(rows.domains)) > 1 else None

    def votes(self, views: Views) -> tuple[dict[str, Floats], Floats]:
        """Estimated score of every model by each view, float64 (n, num_models), and similarity to the nearest
        training prompt (0..1), float64 (n,)."""
        near, similarity = self._neighbours(views)
        found = {
            "logistic": np.column_stack([each(_beside(views.words, views)) for each in self._logistic]),
            "ridge": self._ridge.predict(_beside(views.everything, views)),
            "trees": self._trees.predict(views.compact),
            "neighbours": near,
        }
        if self._subjects is not None:
            found["subjects"] = self._subjects.scores(views)
        return found, similarity

    def _neighbours(self, views: Views) -> tuple[Floats, Floats]:
        """Scores among the nearest training prompts, and similarity to the very nearest (0..1)."""
        num_rows, count = views.everything.shape[0], min(NUM_NEIGHBOURS, self._known.shape[0] - 1)
        scores, nearest = np.zeros((num_rows, self._scores.shape[1])), np.zeros(num_rows)
        for start in range(0, num_rows, _BLOCK):  # a block of similarities at a time, to bound the memory
            block = (views.everything[start : start + _BLOCK] @ self._known.T).toarray()
            picked = np.argpartition(-block, count, axis=1)[:, :count]
            weights = np.take_along_axis(block, picked, axis=1) ** 2 + 1e-12
            sums = np.einsum("ij,ijk->ik", weights, self._scores[picked])
            scores[start : start + _BLOCK] = sums / weights.sum(axis=1)[:, None]
            # Words and characters are normed apart: two views of length one.
            nearest[start : start + _BLOCK] = block.max(axis=1) / 2
        return scores, nearest


class ScoreModel:
    """Estimates of every model's score, votes weighed by what they earned on left-out groups.

    Parameters
    ----------
    rows : graded prompts
    counts : of these prompts, and of all that will be estimated
    seed : of the left-out part and the trees

    Attributes
    ----------
    weights : weight of each view
    least_similarity : to the nearest training prompt; what is below it is foreign
    """

    def __init__(self, rows: ScoreRows, counts: PromptCounts, *, seed: int) -> None:
        held = held_out(rows.groups, seed)
        first = Voters(rows.take(np.flatnonzero(~held)), counts, seed)
        votes, similarity = first.votes(first.encode(rows.take(np.flatnonzero(held)).prompts))
        scores = rows.scores[held]
        self.least_similarity = float(np.quantile(similarity, FOREIGN_QUANTILE))
        self.weights = {
            name: float(np.mean([earned(vote[:, k], scores[:, k]) for k in range(scores.shape[1])]))
            for name, vote in votes.items()
        }
        self._lines = _lines(_mean_vote(votes, self.weights), scores)
        self._voters = Voters(rows, counts, seed)

    def estimates(self, prompts: Sequence[str]) -> tuple[Floats, Floats]:
        """Scores to be expected, float64 (n, num_models), and similarity to the nearest training prompt, (n,)."""
        votes, similarity = self._voters.votes(self._voters.encode(prompts))
        mean = _mean_vote(votes, self.weights)
        return np.clip(mean * self._lines[0] + self._lines[1], 0.0, 1.0), similarity


def held_out(groups: Ints, seed: int) -> NDArray[np.bool_]:
    """A fifth of the groups, at random."""
    unique, inverse = np.unique(groups, return_inverse=True)
    count = max(int(HELD_SHARE * len(unique)), 1)
    picked = np.zeros(len(unique), dtype=np.bool_)
    picked[np.random.default_rng(seed).permutation(len(unique))[:count]] = True
    held: NDArray[np.bool_] = picked[inverse]
    return held


def earned(vote: Floats, truth: Floats) -> float:
    """Squared correlation with the truth, none for a negative one; a little for all, so that none is noise."""
    if vote.std() < 1e-12 or truth.std() < 1e-12:
        return 0.0
    return max(float(np.corrcoef(vote, truth)[0, 1]), 0.01) ** 2


def _mean_vote(votes: dict[str, Floats], weights: dict[str, float]) -> Floats:
    total = sum(weights.values()) or 1.0
    first = next(iter(votes.values()))
    return sum((weights[name] * vote for name, vote in votes.items()), np.zeros(first.shape)) / total


def _lines(estimates: Floats, scores: Floats) -> Floats:
    """Slope and intercept per model that take estimates to scores on rows left out, float64 (2, num_models)."""
    found = np.zeros((2, scores.shape[1]))
    for k in range(scores.shape[1]):
        spread = float(estimates[:, k].var())
        slope = max(float(np.cov(estimates[:, k], scores[:, k], bias=True)[0, 1]) / spread, 0.0) if spread else 0.0
        found[:, k] = slope, float(scores[:, k].mean()) - slope * float(estimates[:, k].mean())
    return found


class _Subjects:
    """Mean score in the subject a prompt seems to belong to."""

    def __init__(self, views: Views, rows: ScoreRows) -> None:
        from sklearn.linear_model import LogisticRegression

        labels, inverse = np.unique(rows.domains, return_inverse=True)
        self._model = LogisticRegression(C=0.1, max_iter=40, tol=1e-2).fit(views.compact, inverse)
        sums = np.zeros((len(labels), rows.scores.shape[1]))
        np.add.at(sums, inverse, rows.scores)
        counts = np.bincount(inverse)[:, None]
        self._means = ((sums + 10 * rows.scores.mean(axis=0)) / (counts + 10))[self._model.classes_]

    def scores(self, views: Views) -> Floats:
        found: Floats = self._model.predict_proba(views.compact) @ self._means
        return found


def _logistic(matrix: Any, grades: Floats) -> Callable[[Any], Floats]:
    """P(grade above a half); a constant where all are on one side."""
    from sklearn.linear_model import LogisticRegression

    right = grades > 0.5
    if right.all() or not right.any():
        share = float(right.mean())
        return lambda rows: np.full(rows.shape[0], share)
    fitted = LogisticRegression(C=1.0, solver="liblinear", tol=1e-2).fit(matrix, right)
    return lambda rows: np.asarray(fitted.predict_proba(rows)[:, 1], dtype=np.float64)


def _beside(matrix: Any, views: Views) -> Any:
    from scipy.sparse import csr_matrix, hstack

    return hstack([matrix, csr_matrix(_SHAPE_WEIGHT * views.shape)]).tocsr()
