"""Predicted answers are only ever a faster way to the same answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.prediction import FIRST_CHECK, LONGEST_CHECK, PredictionCursor
from engine.request import Prediction

tokens = st.lists(st.integers(0, 5), max_size=60)


def follow(cursor: PredictionCursor, answer: list[int]) -> tuple[int, int, int]:
    """Write an answer as a greedy engine would: steps taken, tokens checked, and tokens that stood of those."""
    written = num_steps = num_checked = num_stood = 0
    while written < len(answer):
        proposed = cursor.propose(min(cursor.num_wanted, len(answer) - written - 1))
        stood = 0
        while stood < len(proposed) and proposed[stood] == answer[written + stood]:
            stood += 1
        cursor.observe(answer[written : written + stood + 1], len(proposed))
        written += stood + 1
        num_steps += 1
        num_checked += len(proposed)
        num_stood += stood
    return num_steps, num_checked, num_stood


# The place in the prediction


def test_a_right_prediction_is_read_in_growing_steps() -> None:
    answer = [i % 97 for i in range(500)]
    cursor = PredictionCursor(Prediction(tuple(answer)))
    steps, checked, stood = follow(cursor, answer)
    # 32 and one drawn, 64 + 1, 128 + 1, 128 + 1, 128 + 1, and what is left.
    assert steps == 6
    assert checked == stood == 500 - steps
    assert cursor.num_accepted == 500
    assert cursor.num_wanted == 0


def test_a_wrong_prediction_costs_one_short_check() -> None:
    cursor = PredictionCursor(Prediction(tuple(range(1000))))
    steps, checked, stood = follow(cursor, [2000 + i for i in range(50)])
    assert (steps, checked, stood) == (50, FIRST_CHECK, 0)
    assert cursor.num_accepted == 0


def test_after_a_difference_it_is_taken_up_again_further_on() -> None:
    answer = list(range(200))
    replaced = [*answer[:50], 777, *answer[51:]]
    inserted = [*answer[:50], 777, 778, *answer[50:]]
    removed = [*answer[:50], *answer[60:]]
    for predicted in (replaced, inserted, removed):
        cursor = PredictionCursor(Prediction(tuple(predicted)))
        steps, _, _ = follow(cursor, answer)
        assert steps < 20
        assert cursor.num_accepted > 180


def test_false_matches_teach_it_to_ask_for_longer_ones() -> None:
    # Every pair of the answer is in the prediction, each time with another token after it.
    predicted = [token for i in range(400) for token in (1, 2, 1000 + i)]
    answer = [token for i in range(400) for token in (1, 2, 5000 + i)]
    cursor = PredictionCursor(Prediction(tuple(predicted)))
    _, checked, stood = follow(cursor, answer)
    assert checked - stood < FIRST_CHECK + 60


def test_it_waits_for_the_token_after_which_the_answer_comes() -> None:
    cursor = PredictionCursor(Prediction((1, 2, 3, 4), after_id=9))
    cursor.observe([1, 2, 3])
    assert cursor.num_wanted == 0
    cursor.observe([5, 9])
    assert cursor.propose(cursor.num_wanted) == [1, 2, 3, 4]
    cursor.observe([1, 2])
    assert cursor.propose(9) == [3, 4]
    assert cursor.num_accepted == 2


@given(predicted=tokens, answer=tokens, after=st.none() | st.integers(0, 5))
def test_whatever_is_predicted_the_books_add_up(predicted: list[int], answer: list[int], after: int | None) -> None:
    cursor = PredictionCursor(Prediction(tuple(predicted), after))
    steps, checked, stood = follow(cursor, answer)
    assert steps == len(answer) - stood
    assert stood <= cursor.num_accepted <= min(len(predicted), len(answer))
    assert stood <= checked <= LONGEST_CHECK * steps
