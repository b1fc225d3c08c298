"""How long a place is held is learnt from the ends that tell, forgotten over 32 of them, and silence is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue_wait import HeldTime

seconds = st.floats(0.0, 1000.0)


@given(st.lists(seconds, max_size=32))
def test_up_to_thirty_two_ends_count_alike(held_s: list[float]) -> None:
    found = HeldTime()
    for each in held_s:
        found.ended(each, 0.0, was_full=True)
    assert found.expect_s(0.0) == pytest.approx(sum(held_s) / len(held_s) if held_s else 1.0)
    assert found.is_measured is bool(held_s)


@given(st.lists(seconds, min_size=33, max_size=60))
def test_more_of_them_move_the_mean_by_a_thirty_second(held_s: list[float]) -> None:
    found = HeldTime()
    for each in held_s[:-1]:
        found.ended(each, 0.0, was_full=True)
    before = found.expect_s(0.0)
    found.ended(held_s[-1], 0.0, was_full=True)
    assert found.expect_s(0.0) == pytest.approx(before + (held_s[-1] - before) / 32, abs=1e-9)


def test_what_ends_while_places_are_free_counts_until_something_tells_more() -> None:
    found = HeldTime()
    for each in (3.0, 5.0):
        found.ended(each, 0.0, was_full=False)
    assert (found.expect_s(0.0), found.is_measured) == (4.0, False)
    found.ended(20.0, 0.0, was_full=True)
    assert (found.expect_s(0.0), found.is_measured) == (20.0, True)
    found.ended(1.0, 0.0, was_full=False)
    assert found.expect_s(0.0) == 20.0
    found.ended(10.0, 0.0, was_full=True)
    assert found.expect_s(0.0) == 15.0


def test_where_nothing_has_ended_for_longer_than_the_mean_that_long_is_expected() -> None:
    found = HeldTime()
    assert found.expect_s(100.0) == 1.0, "nothing was to be expected yet"
    found.filled(100.0)
    assert (found.expect_s(100.5), found.expect_s(107.0)) == (1.0, 7.0)
    found.ended(2.0, 110.0, was_full=True)
    assert (found.expect_s(111.0), found.expect_s(115.0)) == (2.0, 5.0)
