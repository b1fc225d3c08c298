"""A table's rows are taken from every column alike, however its columns are held."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from classifier.encoder import RawRows, read_requests
from classifier.errors import TrainingError
from classifier.hashing import HashConfig
from classifier.log_view import LogViews
from classifier.rows import WHOLE, Floats, Rows
from classifier.table import MIN_ROWS, TrainingTable
from tests.classifier.simulated_ladder import request_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Rows):
    mark: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Rows):
    """One column of each kind."""

    missing: Floats | None = None
    names: tuple[str, ...]
    values: Floats
    inner: Inner
    source: str = field(default="", metadata=WHOLE)


def sample(count: int, start: int = 0) -> Sample:
    marks = np.arange(start, start + count)
    return Sample(
        names=tuple(str(mark) for mark in marks),
        values=np.stack([marks, -marks], axis=1).astype(np.float64),
        inner=Inner(mark=marks),
        source=f"from {start}",
    )


def assert_marks(found: Sample, marks: list[int]) -> None:
    assert len(found) == len(marks)
    assert found.names == tuple(map(str, marks))
    assert found.values.tolist() == [[mark, -mark] for mark in marks]
    assert found.inner.mark.tolist() == marks
    assert found.missing is None


@given(st.integers(1, 12), st.data())
def test_rows_come_in_the_given_order_from_every_column(count: int, data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, count - 1), max_size=15))
    found = sample(count).take(picked)
    assert_marks(found, picked)
    assert found.source == "from 0"
    assert_marks(sample(count).take(np.array(picked, dtype=np.int64)), picked)


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_mask_picks_the_rows_it_marks(mask: list[bool]) -> None:
    expected = [row for row, is_in in enumerate(mask) if is_in]
    assert_marks(sample(len(mask)).take(np.array(mask)), expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_joining_undoes_taking_apart(sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes]).tolist()
    whole = sample(sum(sizes))
    parts = [whole.take(range(begin, end)) for begin, end in pairwise(starts)]
    assert_marks(Sample.join(parts), list(range(sum(sizes))))


def test_a_table_is_built_by_name_only() -> None:
    with pytest.raises(TypeError):
        Inner(np.arange(3))  # type: ignore[misc]
    with pytest.raises(TypeError, match="values"):
        Sample(names=("a",), inner=Inner(mark=np.arange(1)))  # type: ignore[call-arg]


def test_a_subset_of_a_checked_table_is_checked_again() -> None:
    requests = [request_of(f"question {number}") for number in range(MIN_ROWS + 5)]
    table = TrainingTable.build(requests, np.ones((len(requests), 2)), window="here")
    part = table.take(np.arange(3, MIN_ROWS + 3))
    assert part.requests == tuple(requests[3 : MIN_ROWS + 3])
    assert (part.window, part.label_source, part.typical, part.as_good) == ("here", "reference", None, None)
    with pytest.raises(TrainingError, match="too few"):
        table.take(np.arange(MIN_ROWS - 1))


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.data())
def test_texts_read_together_are_taken_apart_again(texts: list[str], data: st.DataObject) -> None:
    """Runs laid end to end are columns too: a row's own n-grams and words stay with it."""
    config = HashConfig(word_bits=8, char_bits=8)
    row = data.draw(st.integers(0, len(texts) - 1))
    alone = read_requests([request_of(texts[row])], 2, config)
    together = read_requests([request_of(text) for text in texts], 2, config).take([row, row])
    expected = RawRows.join([alone, alone])
    assert together.dense.tolist() == expected.dense.tolist()
    assert together.counts.buckets.tolist() == expected.counts.buckets.tolist()
    assert together.counts.values.tolist() == expected.counts.values.tolist()
    assert together.words.hashes.tolist() == expected.words.hashes.tolist()
    assert len(together) == 2


def test_no_rows_are_a_table_too() -> None:
    empty = LogViews.empty(3, 4)
    assert len(empty) == len(empty.take([])) == 0
    assert empty.take([]).right.shape == (0, 3)
    assert len(replace(sample(2), missing=np.ones(2)).take([1])) == 1
