"""How foreign a request is to the training window, as one minus a conformal p-value.

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

import numpy as np
from numpy.typing import NDArray

from classifier.encoder import EncodedRow, RawRow
from classifier.hashing import buckets_of, word_ngram_hashes

SEEN_BITS = 17
NUM_READINGS = 4
_GRID = 257

Floats = NDArray[np.float64]
Readings = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class SeenWords:
    """What the training window held.

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
    def fit(cls, rows: Sequence[RawRow]) -> SeenWords:
        """Mark everything that occurs."""
        marks = [np.zeros(1 << SEEN_BITS, dtype=np.bool_) for _ in range(2)]
        for row in rows:
            for order, mark in enumerate(marks, start=1):
                mark[buckets_of(word_ngram_hashes(row.word_hashes, order), SEEN_BITS)] = True
        prompts = np.unique(np.array([wording_hash(row) for row in rows], dtype=np.uint32))
        return cls(marks[0], marks[1], prompts)

    def knows(self, row: RawRow) -> bool:
        """Whether the very same wording was there, case, spacing and the digits of figures aside."""
        return wording_hash(row) in self._known

    def unseen_shares(self, row: RawRow) -> tuple[float, float]:
        """Shares of the row's words and word pairs that never occurred; 0 where there are none."""
        shares = []
        for order, mark in enumerate((self.words, self.pairs), start=1):
            buckets = buckets_of(word_ngram_hashes(row.word_hashes, order), SEEN_BITS)
            shares.append(1.0 - np.count_nonzero(mark.take(buckets)) / len(buckets) if len(buckets) else 0.0)
        return shares[0], shares[1]


def wording_hash(row: RawRow) -> int:
    """Hash of all words in order; of a prompt without words, of its counted n-grams."""
    content = row.word_hashes if len(row.word_hashes) else row.counts.buckets
    return zlib.crc32(content.tobytes())


def readings(seen: SeenWords, raw: RawRow, encoded: EncodedRow, projected: NDArray[np.float32]) -> Readings:
    """The four readings of one request, larger is more foreign.

    Parameters
    ----------
    seen : of the training window
    raw, encoded : the request
    projected : float32 (k,), its TF-IDF row in the training subspace (orthonormal directions)
    """
    values, dense = encoded.sparse.values, encoded.dense
    energy = float(values.dot(values))
    outside = 1.0 - min(float(projected.dot(projected)) / energy, 1.0) if energy > 0 else 1.0
    # numpy.mean, without the arguments it has besides.
    spread = float(np.sqrt(np.add.reduce(dense * dense) / np.float32(len(dense))))
    return (*seen.unseen_shares(raw), outside, spread)


@dataclass(frozen=True, slots=True)
class NoveltyScale:
    """Readings to novelty.

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
        """Quantiles of held-out readings, float64 (n, 4)."""
        levels = _levels(len(held_out))
        grids = np.quantile(held_out, levels, axis=0).T
        scale = cls(grids, np.zeros(len(levels)), len(held_out))
        combined = np.quantile([scale.combine(row) for row in held_out.tolist()], levels)
        return cls(grids, combined, len(held_out))

    def combine(self, reading: Sequence[float]) -> float:
        """Fisher's sum of minus log tail shares."""
        grids = self._sorted[:NUM_READINGS]
        return -sum([math.log(self._tail(grid, each)) for grid, each in zip(grids, reading, strict=True)])

    def novelty(self, reading: Sequence[float]) -> float:
        """0 (familiar) to almost 1 (foreign): one minus the conformal p-value."""
        return 1.0 - self._tail(self._sorted[NUM_READINGS], self.combine(reading))

    def _tail(self, grid: Sequence[float], value: float) -> float:
        """Share of held-out rows at or above ``value``, never 0."""
        return self._tails[bisect_left(grid, value)]


def _levels(num_rows: int) -> Floats:
    """Quantile levels, denser towards 1, where decisions are made."""
    count = min(_GRID, num_rows)
    even = np.linspace(0.0, 1.0, count)
    return 1.0 - (1.0 - even) ** 2
