"""Groups never cross a split, whatever the folds are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.errors import TrainingError
from classifier.folds import fold_splits, group_folds

many_groups = st.lists(st.integers(0, 12), min_size=2, max_size=60).filter(lambda groups: len(set(groups)) > 1)


@given(many_groups, st.integers(2, 7), st.integers(0, 99))
def test_dealt_folds_keep_groups_whole_and_even(given_groups: list[int], num_folds: int, seed: int) -> None:
    groups = np.array(given_groups)
    folds = group_folds(groups, num_folds, seed)
    assert all(len(set(folds[groups == group])) == 1 for group in set(given_groups))
    sizes = np.bincount(folds)
    assert len(sizes) == min(num_folds, len(set(given_groups)))
    assert sizes.min() > 0
    assert sizes.max() - sizes.min() <= np.bincount(groups).max()
    assert (group_folds(groups, num_folds, seed) == folds).all()


@given(many_groups, st.data())
def test_a_split_judges_every_row_once_and_fits_on_none_of_its_kin(groups: list[int], data: st.DataObject) -> None:
    folds = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(groups), max_size=len(groups))))
    named, judged = np.array(groups), []
    for fit, judge in fold_splits(folds, named):
        assert not set(named[fit]) & set(named[judge])
        judged += judge.tolist()
        # Nothing is left out for any other reason.
        assert len(fit) + np.isin(named, named[judge]).sum() == len(groups)
    assert sorted(judged) == list(range(len(groups)))


@given(many_groups)
def test_where_folds_keep_groups_whole_both_splits_are_the_same(groups: list[int]) -> None:
    folds = group_folds(np.array(groups), 3, 0)
    for plain, checked in zip(fold_splits(folds), fold_splits(folds, np.array(groups)), strict=True):
        assert [part.tolist() for part in plain] == [part.tolist() for part in checked]


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(TrainingError, match="one group"):
        group_folds(np.zeros(9, dtype=np.int64), 5, 0)
