"""A request to the numbers estimators read: standardised dense features and a TF-IDF row of hashed n-grams.

An encoder is fitted once on the training window and then frozen into the artifact; nothing of it is learned later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.features import history_features, text_features
from classifier.hashing import HashConfig, SparseRow, hash_text, word_hashes
from classifier.text import clip, words
from classifier.types import RouterRequest

MAX_STANDARD_SCORE = 6.0
"""Standardised features are clipped here: a foreign prompt must not push a linear model to certainty."""

# As arrays of no dimension, which numpy takes as they are.
_LEAST_SCORE, _MOST_SCORE, _ONE = (
    np.array(each, dtype=np.float32) for each in (-MAX_STANDARD_SCORE, MAX_STANDARD_SCORE, 1.0)
)


@dataclass(frozen=True, slots=True)
class RawRow:
    """One request before weighting: float32 (num_features,) dense, bucket counts, uint32 word hashes in order."""

    dense: NDArray[np.float32]
    counts: SparseRow
    word_hashes: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One request as estimators read it: float32 (num_dense,) dense in standard scores, then L2-normed TF-IDF."""

    dense: NDArray[np.float32]
    sparse: SparseRow


def read_request(request: RouterRequest, num_tiers: int, config: HashConfig) -> RawRow:
    """Everything read off one request's text, in one pass over its words."""
    text = clip(request.text)
    tokens = words(text)
    dense = text_features(request, text, tokens) + history_features(request.history, num_tiers)
    hashes = word_hashes(tokens)
    return RawRow(np.array(dense, dtype=np.float32), hash_text(text, hashes, config), hashes)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Fitted weights of the encoding.

    Attributes
    ----------
    config : the hashing schema
    idf : float32 (num_buckets,), smoothed inverse document frequency
    mean, scale : float32 (num_features,), of the dense features over the training window; scale 0 silences a
        feature that never varied there, whatever it does later
    """

    config: HashConfig
    idf: NDArray[np.float32]
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def fit(cls, rows: Sequence[RawRow], config: HashConfig) -> Encoder:
        """Document frequencies and moments of a training window."""
        frequency = np.zeros(config.num_buckets, dtype=np.int64)
        for row in rows:
            frequency[row.counts.buckets] += 1
        idf = np.log((1 + len(rows)) / (1 + frequency)) + 1
        dense = np.stack([row.dense for row in rows]).astype(np.float64)
        spread = dense.std(axis=0)
        inverse = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-6)
        return cls(config, idf.astype(np.float32), dense.mean(axis=0).astype(np.float32), inverse.astype(np.float32))

    def encode(self, row: RawRow) -> EncodedRow:
        """Standardise and weight one row; words and characters are normed apart, so neither drowns the other."""
        dense = row.dense - self.mean
        dense *= self.scale
        np.maximum(dense, _LEAST_SCORE, out=dense)
        np.minimum(dense, _MOST_SCORE, out=dense)
        buckets = row.counts.buckets
        weighted = np.log(row.counts.values)
        weighted += _ONE
        weighted *= self.idf.take(buckets)
        split = int(buckets.searchsorted(1 << self.config.word_bits))
        for part in (weighted[:split], weighted[split:]):
            norm = math.sqrt(part.dot(part))
            if norm > 0:
                part /= norm
        return EncodedRow(dense, SparseRow(buckets, weighted))


def append_embedding(dense: NDArray[np.float32], embedding: NDArray[np.float32]) -> NDArray[np.float32]:
    """The dense block with a sentence embedding behind it, rescaled so each coordinate has about unit variance."""
    return np.concatenate([dense, embedding * np.float32(np.sqrt(len(embedding)))])
