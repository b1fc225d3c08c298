"""Text to a sparse bag of hashed word and character n-grams, in numpy alone.

The same few lines run at training and at serving, so nothing can drift between the two. Hashing needs no vocabulary:
an artifact holds one weight a bucket, and a prompt in any script is encoded in bounded time.

References
----------
Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning" (unsigned here: idf reads the counts).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.text import normalise

_GOLDEN = np.uint32(2_654_435_761)
_ROLL = np.uint32(2_246_822_507)


_FIRST = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class HashConfig:
    """How many buckets (as powers of two) and which n-grams; part of an artifact's feature schema."""

    word_bits: int = 13
    char_bits: int = 13
    max_word_ngram: int = 2
    char_ngrams: tuple[int, int] = (3, 5)

    @property
    def num_buckets(self) -> int:
        """Word buckets come first, then character buckets."""
        return (1 << self.word_bits) + (1 << self.char_bits)


@dataclass(frozen=True, slots=True)
class SparseRow:
    """One encoded text: bucket ids int64 (k,), strictly increasing, and float32 (k,) counts or weights."""

    buckets: NDArray[np.int64]
    values: NDArray[np.float32]


def word_hashes(words: Sequence[str]) -> NDArray[np.uint32]:
    """32-bit hashes of the normalised words, in order; lone surrogates are hashed as they come."""
    crc = zlib.crc32
    hashes = [crc(normalise(word).encode("utf-8", "surrogatepass")) for word in words]
    return np.array(hashes, dtype=np.uint32)


def word_ngram_hashes(hashes: NDArray[np.uint32], order: int) -> NDArray[np.uint32]:
    """Hashes of runs of ``order`` words, of the same family as :func:`word_hashes` (order 1 gives them back)."""
    if len(hashes) < order:
        return np.empty(0, dtype=np.uint32)
    rolled = hashes[: len(hashes) - order + 1].copy()
    for offset in range(1, order):
        rolled = (rolled ^ (rolled >> np.uint32(15))) * _ROLL + hashes[offset : len(hashes) - order + 1 + offset]
    return rolled


def char_ngram_hashes(text: str, shortest: int, longest: int) -> NDArray[np.uint32]:
    """Hashes of all character runs of ``shortest`` to ``longest``, digits folded to zero, case and spacing folded."""
    folded = f" {' '.join(text.lower().split())} "
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    # From 1, so that a run of zeros is not taken for a shorter one.
    codes = np.where((codes >= 48) & (codes <= 57), np.uint32(48), codes) + np.uint32(1)
    rolled = codes
    runs = []
    for length in range(2, longest + 1):
        if len(rolled) < 2:
            break
        rolled = rolled[:-1] * _ROLL + codes[length - 1 :]
        if length >= shortest:
            runs.append(rolled ^ (rolled >> np.uint32(13)))
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.uint32)


def buckets_of(hashes: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """Multiplicative hashing (Knuth 6.4): the top ``bits`` of the product are the well-mixed ones."""
    return ((hashes * _GOLDEN) >> np.uint32(32 - bits)).astype(np.int64)


def count_buckets(buckets: NDArray[np.int64]) -> SparseRow:
    """Each bucket once, with its count. Several times quicker than ``numpy.unique`` on the few hundred of a prompt."""
    if not len(buckets):
        return SparseRow(buckets, np.empty(0, dtype=np.float32))
    ordered = np.sort(buckets)
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    starts = np.concatenate([_FIRST, starts])
    counts = np.empty(len(starts), dtype=np.float32)
    counts[:-1] = starts[1:] - starts[:-1]
    counts[-1] = len(ordered) - starts[-1]
    return SparseRow(ordered[starts], counts)


def hash_text(text: str, hashes: NDArray[np.uint32], config: HashConfig) -> SparseRow:
    """Counts per bucket of a text whose :func:`word_hashes` are given.

    Parameters
    ----------
    text : the clipped text
    hashes : uint32 (num_words,), from :func:`word_hashes`
    config : the schema

    Returns
    -------
    SparseRow, word buckets below ``1 << word_bits``, character buckets above
    """
    grams = [word_ngram_hashes(hashes, order) for order in range(1, config.max_word_ngram + 1)]
    word_buckets = buckets_of(np.concatenate(grams), config.word_bits)
    chars = char_ngram_hashes(text, *config.char_ngrams)
    char_buckets = buckets_of(chars, config.char_bits) + (1 << config.word_bits)
    return count_buckets(np.concatenate([word_buckets, char_buckets]))
