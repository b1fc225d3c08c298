"""The hashed bag is what a slow, plain program says it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from classifier.hashing import (
    HashConfig,
    SparseRows,
    WordRuns,
    buckets_of,
    char_ngram_hashes,
    fold,
    hash_texts,
    word_hashes,
    word_ngram_hashes,
)
from classifier.text import words

CONFIG = HashConfig(word_bits=10, char_bits=9)
any_text = st.text(st.characters(codec=None), max_size=200)


def hashed(*texts: str) -> SparseRows:
    return hash_texts(texts, WordRuns.of(list(map(words, texts))), CONFIG)


def encode(text: str) -> dict[int, float]:
    row = hashed(text)
    return dict(zip(row.buckets.tolist(), row.values.tolist(), strict=True))


@given(any_text)
def test_buckets_are_sorted_and_in_their_block(text: str) -> None:
    row = hashed(text)
    assert (np.diff(row.buckets) > 0).all()
    assert len(row.buckets) == 0 or (row.buckets[0] >= 0 and row.buckets[-1] < CONFIG.num_buckets)
    num_words = len(words(text))
    word_mass = row.values[row.buckets < 1 << CONFIG.word_bits].sum()
    assert word_mass == num_words + max(num_words - 1, 0)
    assert row.bounds.tolist() == [0, int((row.buckets < 1 << CONFIG.word_bits).sum()), len(row.buckets)]


@given(st.lists(any_text, min_size=1, max_size=6), st.data())
def test_texts_are_hashed_together_as_each_alone(texts: list[str], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.sampled_from(range(len(texts))), min_size=1, max_size=4))
    found = hashed(*texts).take(picked)
    expected = SparseRows.join([hashed(texts[each]) for each in picked])
    assert found.buckets.tolist() == expected.buckets.tolist()
    assert found.values.tolist() == expected.values.tolist()
    assert found.bounds.tolist() == expected.bounds.tolist()


@given(any_text)
def test_characters_are_counted_as_a_plain_loop_counts_them(text: str) -> None:
    folded = " " + " ".join(text.lower().split()) + " "
    # Decimal digits of ASCII are one symbol; every n-gram of equal symbols must share a bucket, counted once each.
    symbols = ["0" if c in "0123456789" else c for c in folded]
    expected = Counter("".join(symbols[i : i + n]) for n in range(3, 6) for i in range(len(symbols) - n + 1))
    runs = np.empty((3, len(fold(text))), dtype=np.uint32)
    char_ngram_hashes(fold(text), 3, 5, runs)
    num_runs = [max(len(fold(text)) + 1 - length, 0) for length in (3, 4, 5)]
    found = Counter(each for run, num in zip(runs.tolist(), num_runs, strict=True) for each in run[:num])
    assert sorted(found.values()) == sorted(expected.values())


@given(st.lists(st.text(st.characters(categories=["Ll"]), min_size=1, max_size=8), max_size=12))
def test_word_pairs_depend_on_order(given_words: list[str]) -> None:
    hashes = word_hashes(given_words)
    pairs = word_ngram_hashes(hashes, 2)
    assert len(pairs) == max(len(given_words) - 1, 0)
    expected = [word_ngram_hashes(word_hashes(given_words[i : i + 2]), 2)[0] for i in range(len(pairs))]
    assert pairs.tolist() == [int(each) for each in expected]


def test_numbers_of_one_shape_are_one_word() -> None:
    assert encode("add 12 and 3045") == encode("Add 99  and 1111")
    assert encode("add 12 and 3045") != encode("add 12 and 345")


def test_buckets_are_spread_evenly() -> None:
    hashes = word_hashes([f"word{'x' * (i % 7)}{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}" for i in range(676 * 3)])
    counts = np.bincount(buckets_of(np.unique(hashes), 6), minlength=64)
    assert counts.max() < 4 * counts.mean()
