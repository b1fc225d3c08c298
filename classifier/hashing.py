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
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from classifier.text import MAX_WORD_CHARS, normalise

# Constants of no dimension: numpy takes them without looking for a common type, half the time of a small array's turn.
_GOLDEN = np.array(2_654_435_761, dtype=np.uint32)
_ROLL = np.array(2_246_822_507, dtype=np.uint32)
_MIX_WORDS = np.array(15, dtype=np.uint32)
_MIX_CHARS = np.array(13, dtype=np.uint32)
_ONE = np.array(1, dtype=np.uint32)
_BEYOND = np.iinfo(np.int64).max
_DIGITS_AS_ZERO = str.maketrans(dict.fromkeys("123456789", "0"))


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


@lru_cache(1 << 15)
def _word_hash(word: str) -> int:
    """Of at most ``MAX_WORD_CHARS``; remembered, because few words make up most of any text."""
    return zlib.crc32(normalise(word).encode("utf-8", "surrogatepass"))


def word_hashes(words: Sequence[str]) -> NDArray[np.uint32]:
    """32-bit hashes of the normalised words, in order; lone surrogates are hashed as they come."""
    return np.array([_word_hash(word[:MAX_WORD_CHARS]) for word in words], dtype=np.uint32)


def word_ngram_hashes(hashes: NDArray[np.uint32], order: int) -> NDArray[np.uint32]:
    """Hashes of runs of ``order`` words, of the same family as :func:`word_hashes` (order 1 gives them back)."""
    if len(hashes) < order:
        return np.empty(0, dtype=np.uint32)
    rolled = hashes[: len(hashes) - order + 1]
    for offset in range(1, order):
        rolled = (rolled ^ (rolled >> _MIX_WORDS)) * _ROLL + hashes[offset : len(hashes) - order + 1 + offset]
    return rolled


def char_ngram_hashes(text: str, shortest: int, longest: int) -> NDArray[np.uint32]:
    """Hashes of all character runs of ``shortest`` to ``longest``, digits folded to zero, case and spacing folded."""
    folded = f" {' '.join(text.lower().split())} ".translate(_DIGITS_AS_ZERO)
    # From 1, so that a run of zeros is not taken for a shorter one.
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), dtype=np.uint32) + _ONE
    rolled = codes
    runs = []
    for length in range(2, longest + 1):
        if len(rolled) < 2:
            break
        rolled = rolled[:-1] * _ROLL + codes[length - 1 :]
        if length >= shortest:
            runs.append(rolled)
    if not runs:
        return np.empty(0, dtype=np.uint32)
    together = np.concatenate(runs)
    together ^= together >> _MIX_CHARS
    return together


@lru_cache(32)
def _shift(bits: int) -> NDArray[np.uint32]:
    return np.array(32 - bits, dtype=np.uint32)


def buckets_of(hashes: NDArray[np.uint32], bits: int) -> NDArray[np.int64]:
    """Multiplicative hashing (Knuth 6.4): the top ``bits`` of the product are the well-mixed ones."""
    return ((hashes * _GOLDEN) >> _shift(bits)).astype(np.int64)


def count_buckets(buckets: NDArray[np.int64]) -> SparseRow:
    """Each bucket once, with its count. Several times quicker than ``numpy.unique`` on the few hundred of a prompt."""
    if not len(buckets):
        return SparseRow(buckets, np.empty(0, dtype=np.float32))
    ordered = np.empty(len(buckets) + 1, dtype=np.int64)
    ordered[:-1], ordered[-1] = buckets, _BEYOND
    ordered.sort()
    # Where each bucket ends; the next one begins behind it.
    ends = (ordered[1:] != ordered[:-1]).nonzero()[0]
    counts = ends.astype(np.float32)
    counts[1:] -= ends[:-1]
    counts[0] += 1.0
    return SparseRow(ordered.take(ends), counts)


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
    char_buckets = buckets_of(chars, config.char_bits)
    char_buckets += 1 << config.word_bits
    return count_buckets(np.concatenate([word_buckets, char_buckets]))
