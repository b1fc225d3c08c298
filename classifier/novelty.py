"""Says how foreign a request is to the training window, as one minus a conformal p-value.

No router transfers: on prompts unlike those it was fitted on, its probabilities mean nothing. Four readings say how
unlike a prompt is: words never seen, word pairs never seen, the part of its n-grams outside the training subspace,
and the size of its standardised dense features. Each becomes a tail share among held-out training rows; their product
(Fisher) is ranked among held-out rows again. So of prompts exchangeable with the training window about one in a
hundred reads 0.99 or more, whatever the readings are worth; how many foreign ones do is what the artifact's metrics
report. A wording that was in the training window as a whole is never foreign.

It does not protect against a familiar wording with a new meaning.

References
----------
Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World", section 2.2. Bates et al. 2023, "Testing for
Outliers with Conformal p-values".
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from classifier.encoder import EncodedRequests, RawRows
from classifier.hashing import WordRuns, buckets_of, lengths_of, word_ngram_hashes
from classifier.rows import Floats

MAX_NOVELTY = 0.995
"""Prompts that look more foreign than this go up; about one familiar prompt in two hundred does, too."""

SEEN_BITS = 17
NUM_READINGS = 4
_GRID = 257


def novelty_bound(num_rows: int) -> float:
    """Return ``MAX_NOVELTY``, or less where so few rows were seen that no prompt could read more foreign than that."""
    return min(MAX_NOVELTY, 1 - 2.5 / (num_rows + 1))


@dataclass(frozen=True, slots=True)
class SeenWords:
    """Holds the words, pairs and wordings of the training window.

    Attributes
    ----------
    words, pairs : bool (2 ** SEEN_BITS,), marks of hashed words and word pairs
    prompts : uint32 (k,), sorted hashes of whole wordings
    """

    words: NDArray[np.bool_]
    pairs: NDArray[np.bool_]
    prompts: NDArray[np.uint32]
    _known: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", frozenset(self.prompts.tolist()))

    @classmethod
    def fit(cls, rows: RawRows) -> SeenWords:
        """Mark everything that occurs."""
        words, pairs = (np.zeros(1 << SEEN_BITS, dtype=np.bool_) for _ in range(2))
        words[buckets_of(rows.words.hashes, SEEN_BITS)] = True
        text_of = np.arange(len(rows)).repeat(lengths_of(rows.words.starts))
        is_within = text_of[:-1] == text_of[1:]
        pairs[buckets_of(word_ngram_hashes(rows.words.hashes, 2)[is_within], SEEN_BITS)] = True
        return cls(words, pairs, np.unique(np.array(wording_hashes(rows), dtype=np.uint32)))

    def check(self) -> None:
        """Raise ValueError where the marks are not as many as words are hashed to."""
        if self.words.shape != (1 << SEEN_BITS,) or self.pairs.shape != self.words.shape or self.prompts.ndim != 1:
            raise ValueError(f"marks of seen words have shapes {self.words.shape} and {self.pairs.shape}")

    def knows(self, rows: RawRows) -> list[bool]:
        """Tell whether each very same wording was there, case, spacing and the digits of figures aside."""
        return [each in self._known for each in wording_hashes(rows)]

    def unseen_shares(self, words: WordRuns) -> Floats:
        """Return shares of each text's words, and of its word pairs, that never occurred; 0 where there are none.

        float64 (n, 2)
        """
        is_seen = self.words.take(buckets_of(words.hashes, SEEN_BITS))
        are_seen = self.pairs.take(buckets_of(word_ngram_hashes(words.hashes, 2), SEEN_BITS))
        shares = []
        # The last word of a text begins no pair of its own, only one into the next text.
        for begin, end in pairwise(words.starts.tolist()):
            num_seen, num_pairs_seen = np.count_nonzero(is_seen[begin:end]), np.count_nonzero(are_seen[begin : end - 1])
            shares.append(
                (
                    1.0 - num_seen / (end - begin) if end > begin else 0.0,
                    1.0 - num_pairs_seen / (end - begin - 1) if end > begin + 1 else 0.0,
                )
            )
        return np.array(shares)


def wording_hashes(rows: RawRows) -> list[int]:
    """Return hashes of all words of each text in order; of a prompt without words, of its counted n-grams."""
    words, buckets = rows.words.hashes, rows.counts.buckets
    starts = zip(pairwise(rows.words.starts.tolist()), pairwise(rows.counts.starts.tolist()), strict=True)
    return [zlib.crc32((words[a:b] if a < b else buckets[c:d]).tobytes()) for (a, b), (c, d) in starts]


def readings(seen: SeenWords, raw: RawRows, encoded: EncodedRequests, projected: NDArray[np.float32]) -> Floats:
    """Return the four readings of each request, larger is more foreign, float64 (n, 4).

    Parameters
    ----------
    seen : of the training window
    raw, encoded : the requests
    projected : float32 (n, k), their TF-IDF rows in the training subspace (orthonormal directions)
    """
    dense = encoded.dense
    found = np.empty((len(dense), NUM_READINGS))
    found[:, :2] = seen.unseen_shares(raw.words)
    # Words and characters are of length one each, where there are any; nothing is inside where there are none.
    num_parts = (lengths_of(encoded.sparse.bounds) > 0).reshape(-1, 2).sum(axis=1)
    inside = np.add.reduce(projected * projected, axis=1)
    found[:, 2] = 1.0 - np.minimum(inside / np.maximum(num_parts, 1), 1.0)
    # numpy.mean, without the arguments it has besides.
    found[:, 3] = np.sqrt(np.add.reduce(dense * dense, axis=1) / np.float32(dense.shape[1]))
    return found


@dataclass(frozen=True, slots=True)
class NoveltyScale:
    """Turns readings into novelty.

    Attributes
    ----------
    grids : float64 (4, k), quantiles of each reading over held-out rows, non-decreasing
    combined : float64 (k,), quantiles of the combined score over the same rows
    num_held_out : rows behind the quantiles; no novelty exceeds ``1 - 1 / (num_held_out + 1)``
    """

    grids: Floats
    combined: Floats
    num_held_out: int
    _tails: tuple[float, ...] = field(init=False, repr=False)
    _sorted: tuple[tuple[float, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.num_held_out
        # Tail share of a value that lies above i of the grid's points; plain floats, for bisect.
        shares = [1.0, *(1.0 - _levels(n))[:-1].tolist(), 0.0]
        object.__setattr__(self, "_tails", tuple((share * n + 1) / (n + 1) for share in shares))
        object.__setattr__(self, "_sorted", tuple(map(tuple, [*self.grids.tolist(), self.combined.tolist()])))

    @classmethod
    def fit(cls, held_out: Floats) -> NoveltyScale:
        """Return quantiles of held-out readings, float64 (n, 4)."""
        levels = _levels(len(held_out))
        grids = np.quantile(held_out, levels, axis=0).T
        scale = cls(grids, np.zeros(len(levels)), len(held_out))
        combined = np.quantile([scale.combine(row) for row in held_out.tolist()], levels)
        return cls(grids, combined, len(held_out))

    def check(self) -> None:
        """Raise ValueError where the quantiles are not those of so many rows."""
        levels = (len(_levels(self.num_held_out)),)
        if self.grids.shape != (NUM_READINGS, *levels) or self.combined.shape != levels or self.num_held_out < 1:
            raise ValueError(f"novelty has quantiles of shapes {self.grids.shape} and {self.combined.shape}")

    def combine(self, reading: Sequence[float]) -> float:
        """Return Fisher's sum of minus log tail shares."""
        grids = self._sorted[:NUM_READINGS]
        return -sum([math.log(self._tail(grid, each)) for grid, each in zip(grids, reading, strict=True)])

    def novelty(self, reading: Sequence[float]) -> float:
        """Return 0 (familiar) to almost 1 (foreign): one minus the conformal p-value."""
        return 1.0 - self._tail(self._sorted[NUM_READINGS], self.combine(reading))

    def _tail(self, grid: Sequence[float], value: float) -> float:
        """Return the share of held-out rows at or above ``value``, never 0."""
        return self._tails[bisect_left(grid, value)]


def _levels(num_rows: int) -> Floats:
    """Return quantile levels, denser towards 1, where decisions are made."""
    count = min(_GRID, num_rows)
    even = np.linspace(0.0, 1.0, count)
    return 1.0 - (1.0 - even) ** 2
