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


class PairEncoder:
    """Fitted on training prompts; turns prompts into :class:`Views`."""

    def __init__(self, prompts: Sequence[str], seed: int) -> None:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        self._words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2, dtype=np.float32)
        self._chars = TfidfVectorizer(
            analyzer="char_wb", ngram_range=(3, 4), sublinear_tf=True, min_df=2, max_features=60_000, dtype=np.float32
        )
        matrix = self._stack(self._words.fit_transform(prompts), self._chars.fit_transform(prompts))
        size = min(NUM_COMPONENTS, min(matrix.shape) - 1)
        self._svd = TruncatedSVD(size, random_state=seed, n_iter=3).fit(matrix)
        self._spread = self._svd.transform(matrix).std(axis=0) + 1e-9
        shape = _shape_of(prompts)
        self._mean, self._scale = shape.mean(axis=0), shape.std(axis=0)

    def __call__(self, prompts: Sequence[str]) -> Views:
        by_word = self._words.transform(prompts)
        everything = self._stack(by_word, self._chars.transform(prompts))
        scale = np.where(self._scale > 1e-9, self._scale, np.inf)
        shape = np.clip((_shape_of(prompts) - self._mean) / scale, -5.0, 5.0)
        return Views(by_word, everything, self._svd.transform(everything) / self._spread, shape)

    @staticmethod
    def _stack(by_word: Any, by_char: Any) -> Any:
        from scipy.sparse import hstack

        return hstack([by_word, by_char]).tocsr()


def _shape_of(prompts: Sequence[str]) -> Floats:
    """The router's own reading of length, structure and vocabulary, float64 (n, d)."""
    rows = []
    for prompt in prompts:
        text = clip(prompt)
        rows.append(text_features(RouterRequest(turns=(("user", prompt),)), text, words(text)))
    return np.array(rows, dtype=np.float64)
