"""Turns requests into what estimators read: standardised dense features and TF-IDF rows of hashed n-grams.

An encoder is fitted once on the training window and then frozen into the artifact; nothing of it is learned later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from classifier.features import history_features, text_features
from classifier.hashing import HashConfig, SparseRows, WordRuns, hash_texts, lengths_of, run_sums
from classifier.rows import Rows
from classifier.text import clip, own_text, words
from classifier.tool_features import TOOL_FEATURES
from classifier.types import RouterRequest

MAX_STANDARD_SCORE = 6.0
"""Standardised features are clipped here: a foreign prompt must not push a linear model to certainty."""

# As arrays of no dimension, which numpy takes as they are.
_LEAST_SCORE, _MOST_SCORE, _ONE, _LEAST_NORM = (
    np.array(each, dtype=np.float32) for each in (-MAX_STANDARD_SCORE, MAX_STANDARD_SCORE, 1.0, 1e-30)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRows(Rows):
    """Holds requests before weighting.

    Attributes
    ----------
    dense : float32 (n, num_features)
    counts : of the hashed n-grams
    words : hashed, in order
    """

    dense: NDArray[np.float32]
    counts: SparseRows
    words: WordRuns


@dataclass(frozen=True, slots=True)
class EncodedRequests:
    """Holds requests as estimators read them: float32 (n, num_dense) in standard scores, then L2-normed TF-IDF."""

    dense: NDArray[np.float32]
    sparse: SparseRows

    def __len__(self) -> int:
        return len(self.dense)


_NO_TOOLS = [0.0] * len(TOOL_FEATURES)


def read_requests(
    requests: Sequence[RouterRequest], num_tiers: int, config: HashConfig, *, reads_tools: bool = False
) -> RawRows:
    """Read all that is read off the requests' texts, in one pass over the words of each, and of tools if wanted."""
    whole = [own_text(request.turns) for request in requests]
    texts = [clip(text) for text in whole]
    tokens = list(map(words, texts))
    dense = [
        text_features(request, len(own), text, each) + history_features(request.history, num_tiers)
        for request, own, text, each in zip(requests, whole, texts, tokens, strict=True)
    ]
    if reads_tools:
        dense = [row + (list(request.tools) or _NO_TOOLS) for row, request in zip(dense, requests, strict=True)]
    hashed = WordRuns.of(tokens)
    counts = hash_texts(texts, hashed, config)
    return RawRows(dense=np.array(dense, dtype=np.float32), counts=counts, words=hashed)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Holds fitted weights of the encoding.

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
    def fit(cls, rows: RawRows, config: HashConfig) -> Encoder:
        """Count document frequencies and moments of a training window."""
        frequency = np.bincount(rows.counts.buckets, minlength=config.num_buckets)
        idf = np.log((1 + len(rows)) / (1 + frequency)) + 1
        dense = rows.dense.astype(np.float64)
        spread = dense.std(axis=0)
        inverse = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 1e-6)
        return cls(config, idf.astype(np.float32), dense.mean(axis=0).astype(np.float32), inverse.astype(np.float32))

    def encode(self, rows: RawRows) -> EncodedRequests:
        """Standardise and weight; words and characters are normed apart, so neither drowns the other."""
        dense = rows.dense - self.mean
        dense *= self.scale
        np.maximum(dense, _LEAST_SCORE, out=dense)
        np.minimum(dense, _MOST_SCORE, out=dense)
        counts = rows.counts
        weighted = np.log(counts.values)
        weighted += _ONE
        weighted *= self.idf.take(counts.buckets)
        norms = np.sqrt(run_sums(weighted * weighted, counts.bounds))
        weighted /= np.maximum(norms, _LEAST_NORM).repeat(lengths_of(counts.bounds))
        return EncodedRequests(dense, SparseRows(counts.buckets, weighted, counts.bounds))


def append_embedding(dense: NDArray[np.float32], embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
    """Append sentence embeddings to dense rows, rescaled so each coordinate has about unit variance."""
    return np.hstack([dense, embeddings * np.float32(np.sqrt(embeddings.shape[1]))])
