"""Turns texts into sparse bags of hashed word and character n-grams, in numpy alone.

The same few lines run at training and at serving, so nothing can drift between the two. Hashing needs no vocabulary:
an artifact holds one weight a bucket, and a prompt in any script is encoded in bounded time.

Texts are hashed together, laid end to end: a prompt has a few hundred n-grams, on which numpy takes longer to begin
than to work. What a text is hashed to does not depend on the others.

References
----------
Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning" (unsigned here: idf reads the counts).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from classifier.text import MAX_WORD_CHARS, has_digit, normalise

# Constants of no dimension: numpy takes them without looking for a common type, half the time of a small array's turn.
_GOLDEN = np.array(2_654_435_761, dtype=np.uint32)
_ROLL = np.array(2_246_822_507, dtype=np.uint32)
_MIX_WORDS = np.array(15, dtype=np.uint32)
_MIX_CHARS = np.array(13, dtype=np.uint32)
_ONE = np.array(1, dtype=np.uint32)
MAX_NGRAM, MAX_BITS = 16, 24
_DIGITS_AS_ZERO = str.maketrans(dict.fromkeys("123456789", "0"))


@dataclass(frozen=True, slots=True)
class HashConfig:
    """Says how many buckets (as powers of two) and which n-grams; part of an artifact's feature schema."""

    word_bits: int = 13
    char_bits: int = 13
    max_word_ngram: int = 2
    char_ngrams: tuple[int, int] = (3, 5)

    @property
    def num_buckets(self) -> int:
        """Count all buckets: those of words come first, then those of characters."""
        return (1 << self.word_bits) + (1 << self.char_bits)

    def check(self) -> None:
        """Raise ValueError for more buckets or longer n-grams than a request should take the room and time for."""
        shortest, longest = self.char_ngrams
        if not (1 <= self.word_bits <= MAX_BITS and 1 <= self.char_bits <= MAX_BITS):
            raise ValueError(f"2 ** {self.word_bits} and 2 ** {self.char_bits} buckets are not read")
        if not (1 <= self.max_word_ngram <= MAX_NGRAM and 1 <= shortest <= longest <= MAX_NGRAM):
            raise ValueError(f"n-grams of {self.max_word_ngram} words and {self.char_ngrams} characters are not read")


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Holds encoded texts, end to end.

    Attributes
    ----------
    buckets : intp (k,), strictly increasing within a text
    values : float32 (k,), counts or weights
    bounds : intp (2 * num_texts + 1,), where each text's word buckets begin, and its character buckets
    """

    buckets: NDArray[np.intp]
    values: NDArray[np.float32]
    bounds: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.bounds) // 2

    @property
    def starts(self) -> NDArray[np.intp]:
        """Return where each text begins, and where the last ends, intp (num_texts + 1,)."""
        return self.bounds[::2]

    def dot(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """Multiply each text by a matrix float32 (num_buckets, m), as float32 (num_texts, m)."""
        found = np.empty((len(self), matrix.shape[1]), dtype=np.float32)
        picked, values = matrix.take(self.buckets, axis=0), self.values
        # Text by text: how a product of all at once is rounded would depend on how many they are.
        for row, (begin, end) in enumerate(pairwise(self.starts.tolist())):
            values[begin:end].dot(picked[begin:end], out=found[row])
        return found

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> SparseRows:
        """Return some of the texts."""
        places, starts = _places(self.starts, rows)
        bounds = np.empty(2 * len(rows) + 1, dtype=np.intp)
        bounds[::2] = starts
        bounds[1::2] = starts[:-1] + lengths_of(self.bounds)[::2][rows]
        return SparseRows(self.buckets[places], self.values[places], bounds)

    @classmethod
    def join(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """Return the texts of all parts, one part after the other."""
        buckets, values = (
            np.concatenate([part.buckets for part in parts]),
            np.concatenate([part.values for part in parts]),
        )
        return cls(buckets, values, _joined([part.bounds for part in parts]))


@dataclass(frozen=True, slots=True)
class WordRuns:
    """Holds the hashed words of texts, end to end.

    Attributes
    ----------
    hashes : uint32 (k,), from :func:`word_hashes`, in order
    starts : intp (num_texts + 1,), where each text begins, and where the last ends
    """

    hashes: NDArray[np.uint32]
    starts: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]]) -> WordRuns:
        """Return the words of each text."""
        together = [word for words in texts for word in words]
        return cls(word_hashes(together), np.array([0, *accumulate(map(len, texts))], dtype=np.intp))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> WordRuns:
        """Return the words of some of the texts."""
        places, starts = _places(self.starts, rows)
        return WordRuns(self.hashes[places], starts)

    @classmethod
    def join(cls, parts: Sequence[WordRuns]) -> WordRuns:
        """Return the words of all parts' texts, one part after the other."""
        return cls(np.concatenate([part.hashes for part in parts]), _joined([part.starts for part in parts]))


def lengths_of(starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the lengths of runs, of their beginnings and the last end: ``numpy.diff`` in a quarter of its time."""
    return starts[1:] - starts[:-1]


def _places(
    starts: NDArray[np.intp], rows: Sequence[int] | NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return where the values of some runs are, and where those runs begin once they are laid end to end."""
    lengths = lengths_of(starts)[rows]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(begins[-1]) + (starts[:-1][rows] - begins[:-1]).repeat(lengths), begins


def _joined(starts: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    """Return where the runs of several parts begin once those are laid end to end."""
    before = [0, *accumulate(int(each[-1]) for each in starts)]
    return np.concatenate([each[:-1] + past for each, past in zip(starts, before, strict=False)] + [before[-1:]])


def word_hashes(words: Sequence[str]) -> NDArray[np.uint32]:
    """Return 32-bit hashes of the normalised words, in order; lone surrogates are hashed as they come.

    All at once, which is quicker than remembering words; and what was remembered of others would show in the time.
    """
    joined = "\n".join(words)
    # Most texts have no word so long; one is looked for where there is room for it.
    if len(joined) > MAX_WORD_CHARS and max(map(len, words)) > MAX_WORD_CHARS:
        words = [word[:MAX_WORD_CHARS] for word in words]
        joined = "\n".join(words)
    pieces = _encoded(joined.lower()).split(b"\n")
    if len(pieces) != len(words):
        pieces = [_encoded(word.lower()) for word in words]
    if has_digit(joined):
        for place, word in enumerate(words):
            if word[0].isdecimal():
                pieces[place] = _encoded(normalise(word))
    return np.array(list(map(zlib.crc32, pieces)), dtype=np.uint32)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def word_ngram_hashes(hashes: NDArray[np.uint32], order: int) -> NDArray[np.uint32]:
    """Return hashes of runs of ``order`` words, of the same family as :func:`word_hashes` (order 1 gives them back)."""
    if len(hashes) < order:
        return np.empty(0, dtype=np.uint32)
    rolled = hashes[: len(hashes) - order + 1]
    for offset in range(1, order):
        rolled = (rolled ^ (rolled >> _MIX_WORDS)) * _ROLL + hashes[offset : len(hashes) - order + 1 + offset]
    return rolled


def fold(text: str) -> str:
    """Return the characters that are hashed: lower case, one space between words and at either end, digits as zeros."""
    return f" {' '.join(text.lower().split())} ".translate(_DIGITS_AS_ZERO)


def char_ngram_hashes(folded: str, shortest: int, longest: int, out: NDArray[np.uint32]) -> None:
    """Hash all character runs of a :func:`fold`-ed text.

    Parameters
    ----------
    out : uint32 (longest - shortest + 1, len(folded)), gets the hash of the run of each length that begins at each
        character; what stands where no such run begins means nothing
    """
    # From 1, so that a run of zeros is not taken for a shorter one.
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), dtype=np.uint32) + _ONE
    rolled = codes
    for length in range(2, min(longest, len(codes)) + 1):
        rolled = rolled[:-1] * _ROLL
        rolled += codes[length - 1 :]
        if length >= shortest:
            out[length - shortest, : len(rolled)] = rolled
    out ^= out >> _MIX_CHARS


@lru_cache(32)
def _shift(bits: int) -> NDArray[np.uint32]:
    return np.array(32 - bits, dtype=np.uint32)


def buckets_of(hashes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Hash by multiplication (Knuth 6.4): the top ``bits`` of the product are the well-mixed ones."""
    return (hashes * _GOLDEN) >> _shift(bits)


def hash_texts(texts: Sequence[str], words: WordRuns, config: HashConfig) -> SparseRows:
    """Count each text's buckets; those of words below ``1 << word_bits``, those of characters above.

    Parameters
    ----------
    texts : clipped; no more than 2 ** 32 keys, one for each text and bucket, can be told apart
    words : of the same texts
    config : the schema
    """
    folded = list(map(fold, texts))
    num_words, num_chars = lengths_of(words.starts).tolist(), list(map(len, folded))
    (shortest, longest), most_words = config.char_ngrams, config.max_word_ngram
    ends = len(words.hashes) * most_words, len(words.hashes) * most_words + sum(num_chars) * (longest - shortest + 1)
    found = np.empty(ends[1] + 1, dtype=np.uint32)
    grams, runs = found[: ends[0]].reshape(most_words, -1), found[ends[0] : ends[1]].reshape(longest - shortest + 1, -1)
    for order in range(1, most_words + 1):
        hashes = word_ngram_hashes(words.hashes, order)
        grams[order - 1, : len(hashes)] = hashes
    char_ngram_hashes("".join(folded), shortest, longest, runs)
    found *= _GOLDEN
    grams >>= _shift(config.word_bits)
    runs >>= _shift(config.char_bits)
    keys, owners, borders = _keys(len(texts), config)
    found[:-1] += owners.repeat(_num_begun(num_words, 1, most_words) + _num_begun(num_chars, shortest, longest))
    found[-1] = keys[-1]
    return _count(found, keys, borders)


@lru_cache(512)
def _keys(num_texts: int, config: HashConfig) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return where the keys of texts begin.

    First the key of each text and of one beyond the last, whose all runs are that lie in two texts; then the keys in
    the order of :func:`_num_begun`; last those of each text's words and characters.
    """
    keys = np.arange(num_texts + 1, dtype=np.uint32) * np.uint32(config.num_buckets)
    first_char = keys + np.uint32(1 << config.word_bits)
    beyond = np.full(num_texts, keys[-1])
    shortest, longest = config.char_ngrams
    owners = [np.stack([keys[:-1], beyond], axis=1).ravel()] * config.max_word_ngram
    owners += [np.stack([first_char[:-1], beyond], axis=1).ravel()] * (longest - shortest + 1)
    return keys, np.concatenate(owners), np.stack([keys, first_char], axis=1).ravel()[:-1]


def _num_begun(lengths: Sequence[int], shortest: int, longest: int) -> list[int]:
    """Return how many runs of each length begin and end in each text, and how many begin in it and end in another."""
    found: list[int] = []
    for run in range(shortest - 1, longest):
        for length in lengths:
            within = length - run if length > run else 0
            found += (within, length - within)
    return found


def _count(found: NDArray[np.uint32], keys: NDArray[np.uint32], borders: NDArray[np.uint32]) -> SparseRows:
    """Count each key; several times quicker than ``numpy.unique`` on the few hundred of a prompt.

    Parameters
    ----------
    found : keys in any order, one of them at least no text's
    keys, borders : see :func:`_keys`
    """
    found.sort()
    # Where each key ends; the next one begins behind it.
    ends = (found[1:] != found[:-1]).nonzero()[0]
    distinct = found.take(ends)
    bounds = distinct.searchsorted(borders)
    ends, distinct = ends[: bounds[-1]], distinct[: bounds[-1]]
    counts = ends + 1
    counts[1:] -= counts[:-1].copy()
    distinct -= keys[:-1].repeat(lengths_of(bounds[::2]))
    return SparseRows(distinct.astype(np.intp), counts.astype(np.float32), bounds)


def run_sums(values: NDArray[np.float32], starts: NDArray[np.intp]) -> NDArray[np.float32]:
    """Sum each run of values, 0 for one without any, float32 (num_runs,)."""
    sums = np.zeros(len(starts) - 1, dtype=np.float32)
    # Of an empty run ``reduceat`` would give what follows it.
    present = lengths_of(starts).nonzero()[0]
    if len(present):
        sums[present] = np.add.reduceat(values, starts.take(present))
    return sums
