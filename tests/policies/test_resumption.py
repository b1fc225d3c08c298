"""Who goes on with an answer that broke off."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.resumption import resumption_order

tiers = st.integers(1, 6)


def test_the_tier_itself_is_asked_last_unless_it_has_other_servers() -> None:
    assert resumption_order(1, (1, 2, 3), (1,), is_replicated=False) == (2, 3, 1)
    assert resumption_order(1, (1, 2, 3), (1,), is_replicated=True) == (1, 2, 3)


def test_nobody_is_asked_three_times_and_others_once() -> None:
    assert resumption_order(2, (1, 2, 3), (1, 2), is_replicated=False) == (3, 2)
    assert resumption_order(1, (1, 2), (1, 1), is_replicated=True) == (2,)
    assert resumption_order(1, (1,), (1, 1), is_replicated=True) == ()


def test_a_tier_that_may_not_answer_any_more_does_not_go_on() -> None:
    assert resumption_order(1, (2, 3), (1,), is_replicated=True) == (2, 3)
    assert resumption_order(1, (), (1,), is_replicated=True) == ()


@given(st.lists(tiers, max_size=8), st.lists(tiers, min_size=1, max_size=6), st.booleans())
def test_only_permitted_tiers_go_on_each_once(permitted: list[int], asked: list[int], is_replicated: bool) -> None:
    order = resumption_order(asked[-1], permitted, asked, is_replicated=is_replicated)
    assert len(set(order)) == len(order)
    assert set(order) <= set(permitted)
    assert not set(order) & (set(asked) - {asked[-1]})
