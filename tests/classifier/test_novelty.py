"""What was seen is familiar, what was not is not, and of familiar rows as few read as foreign as is promised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.encoder import RawRows, read_requests
from classifier.hashing import HashConfig
from classifier.novelty import MAX_NOVELTY, NUM_READINGS, NoveltyScale, SeenWords, novelty_bound
from tests.classifier.simulated_ladder import request_of

CONFIG = HashConfig(word_bits=10, char_bits=10)
WINDOW = ("add the two numbers", "sort these words", "which day comes next", "Reverse the LIST of 12 words")
scale = NoveltyScale.fit(np.random.default_rng(0).random((400, NUM_READINGS)))


def raw(*texts: str) -> RawRows:
    return read_requests([request_of(text) for text in texts], 2, CONFIG)


SEEN = SeenWords.fit(raw(*WINDOW))


@given(st.permutations(WINDOW))
def test_what_was_seen_is_known_in_any_order_and_company(texts: list[str]) -> None:
    assert SEEN.knows(raw(*texts)) == [True] * len(texts)
    assert SEEN.unseen_shares(raw(*texts).words).tolist() == [[0.0, 0.0]] * len(texts)


def test_case_spacing_and_digits_make_no_new_wording() -> None:
    assert SEEN.knows(raw("reverse the  list of 99 WORDS", "reverse the list of 999 words")) == [True, False]


def test_shares_of_unseen_words_and_pairs_are_each_texts_own() -> None:
    shares = SEEN.unseen_shares(raw("sort these numbers", "", "quasar", "words two sort", "sort these words").words)
    assert shares[0] == pytest.approx([0.0, 0.5])  # "these numbers" was never a pair
    assert shares[1].tolist() == [0.0, 0.0]
    assert shares[2].tolist() == [1.0, 0.0]
    # No pair reaches from one text into the next.
    assert shares[3].tolist() == [0.0, 1.0]
    assert shares[4].tolist() == [0.0, 0.0]


@given(st.lists(st.floats(0, 2), min_size=NUM_READINGS, max_size=NUM_READINGS), st.integers(0, NUM_READINGS - 1))
def test_a_larger_reading_is_never_less_foreign(reading: list[float], place: int) -> None:
    more = [value + 0.3 * (number == place) for number, value in enumerate(reading)]
    assert 0 <= scale.novelty(reading) <= scale.novelty(more) <= 1 - 1 / (scale.num_held_out + 1) + 1e-12


@pytest.mark.parametrize("num_rows", [40, 400, 3000])
def test_of_familiar_rows_few_read_as_foreign(num_rows: int) -> None:
    """The conformal promise: a share of at most 1 - level above a level, up to the sampling error of the window."""
    rng = np.random.default_rng(num_rows)
    fitted = NoveltyScale.fit(rng.normal(size=(num_rows, NUM_READINGS)))
    said = np.array([fitted.novelty(row) for row in rng.normal(size=(4000, NUM_READINGS)).tolist()])
    for level in (0.5, 0.9, 0.95):
        allowed = 1 - level
        assert np.mean(said > level) < allowed + 4 * np.sqrt(allowed * level / num_rows) + 0.01
    foreign = [fitted.novelty(row) for row in (rng.normal(size=(50, NUM_READINGS)) + 9).tolist()]
    assert min(foreign) > 1 - 2.5 / (num_rows + 1)


@given(st.integers(3, 10**6))
def test_the_bound_can_be_passed_however_few_rows_there_were(num_rows: int) -> None:
    largest = 1 - 1 / (num_rows + 1)
    assert novelty_bound(num_rows) < largest
    assert novelty_bound(num_rows) <= MAX_NOVELTY


def test_unsound_marks_and_quantiles_are_refused() -> None:
    SEEN.check()
    scale.check()
    with pytest.raises(ValueError, match="seen words"):
        replace(SEEN, words=SEEN.words[:-8]).check()
    with pytest.raises(ValueError, match="seen words"):
        replace(SEEN, pairs=SEEN.pairs[None]).check()
    for broken in (
        replace(scale, grids=scale.grids[:3]),
        replace(scale, combined=scale.combined[:-1]),
        replace(scale, num_held_out=20),
    ):
        with pytest.raises(ValueError, match="quantiles"):
            broken.check()
