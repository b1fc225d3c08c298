"""Prompts graded for a weak and a strong model, and prompts as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from classifier.features import text_features
from classifier.text import clip, words
from classifier.types import RouterRequest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_COMPONENTS = 64
_LEAST_PROMPTS = 2
_MAX_CHARS = 60_000


@dataclass(frozen=True, slots=True)
class PairRows:
    """Prompts with the grades of two models.

    Attributes
    ----------
    prompts : n texts
    weak, strong : float64 (n,), 0..1
    groups : int64 (n,), near-duplicates share one
    domains : n labels of the source, used as a further target in training and never read when predicting
    """

    prompts: tuple[str, ...]
    weak: Floats
    strong: Floats
    groups: Ints
    domains: tuple[str, ...]

    def take(self, rows: Ints) -> PairRows:
        """Some of the rows."""
        return PairRows(
            tuple(self.prompts[i] for i in rows),
            self.weak[rows],
            self.strong[rows],
            self.groups[rows],
            tuple(self.domains[i] for i in rows),
        )

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class Views:
    """Prompts as matrices: TF-IDF of words, of words and characters, its directions, and standardised shape."""

    words: Any
    everything: Any
    directions: Floats
    shape: Floats

    @property
    def compact(self) -> Floats:
        """What trees read, float64 (n, d)."""
        return np.hstack([self.shape, self.directions])


class PromptCounts:
    """N-grams and shapes of prompts, counted once for all the fits that read them.

    Parameters
    ----------
    prompts : every text that will be asked for
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import CountVectorizer

        unique = list(dict.fromkeys(prompts))
        self._row = {prompt: row for row, prompt in enumerate(unique)}
        self.words = CountVectorizer(ngram_range=(1, 2), dtype=np.float32).fit_transform(unique)
        self.chars = CountVectorizer(analyzer="char_wb", ngram_range=(3, 4), dtype=np.float32).fit_transform(unique)
        self.shape = _shape_of(unique)

    def rows(self, prompts: Sequence[str]) -> Ints:
        """Where prompts are, int64 (n,)."""
        return np.array([self._row[prompt] for prompt in prompts], dtype=np.int64)


class _Weighing:
    """TF-IDF of counted n-grams: sublinear, rows of length one; what occurs in one training prompt only is left out."""

    def __init__(self, counts: Any, *, max_features: int | None = None) -> None:
        frequency = np.bincount(counts.indices, minlength=counts.shape[1])
        columns = np.flatnonzero(frequency >= _LEAST_PROMPTS)
        if max_features is not None and len(columns) > max_features:
            totals = np.asarray(counts.sum(axis=0)).ravel()[columns]
            columns = np.sort(columns[np.argsort(-totals, kind="stable")[:max_features]])
        self._columns = columns
        self._idf = (np.log((1 + counts.shape[0]) / (1 + frequency[columns])) + 1).astype(np.float32)

    def __call__(self, counts: Any) -> Any:
        from sklearn.preprocessing import normalize

        found = counts[:, self._columns]
        found.data = (1 + np.log(found.data)) * self._idf[found.indices]
        return normalize(found, copy=False)


class PairEncoder:
    """Fitted on training prompts; turns prompts into :class:`Views`."""

    def __init__(self, prompts: Sequence[str], counts: PromptCounts, seed: int) -> None:
        from sklearn.decomposition import TruncatedSVD

        rows = counts.rows(prompts)
        self._counts = counts
        self._words = _Weighing(counts.words[rows])
        self._chars = _Weighing(counts.chars[rows], max_features=_MAX_CHARS)
        matrix = self._weighed(rows)[1]
        size = min(NUM_COMPONENTS, min(matrix.shape) - 1)
        self._svd = TruncatedSVD(size, random_state=seed, n_iter=3).fit(matrix)
        self._spread = self._svd.transform(matrix).std(axis=0) + 1e-9
        self._mean, self._scale = counts.shape[rows].mean(axis=0), counts.shape[rows].std(axis=0)

    def __call__(self, prompts: Sequence[str]) -> Views:
        rows = self._counts.rows(prompts)
        by_word, everything = self._weighed(rows)
        scale = np.where(self._scale > 1e-9, self._scale, np.inf)
        shape = np.clip((self._counts.shape[rows] - self._mean) / scale, -5.0, 5.0)
        return Views(by_word, everything, self._svd.transform(everything) / self._spread, shape)

    def _weighed(self, rows: Ints) -> tuple[Any, Any]:
        from scipy.sparse import hstack

        by_word = self._words(self._counts.words[rows])
        return by_word, hstack([by_word, self._chars(self._counts.chars[rows])]).tocsr()


def _shape_of(prompts: Sequence[str]) -> Floats:
    """The router's own reading of length, structure and vocabulary, float64 (n, d)."""
    rows = []
    for prompt in prompts:
        text = clip(prompt)
        rows.append(text_features(RouterRequest(turns=(("user", prompt),)), text, words(text)))
    return np.array(rows, dtype=np.float64)
