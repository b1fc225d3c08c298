"""Features are finite, bounded in time, and move with what they are named after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.encoder import read_requests
from classifier.features import feature_names, history_features
from classifier.hashing import HashConfig
from classifier.text import HEAD_CHARS, TAIL_CHARS, clip, words
from classifier.types import RouterRequest
from tests.classifier.simulated_ladder import request_of

NAMES = feature_names(4)


def dense_features(request: RouterRequest, num_tiers: int) -> np.ndarray:
    """All dense features of one request, as a router reads them."""
    return read_requests([request], num_tiers, HashConfig()).dense[0]


def named(prompt: str) -> dict[str, float]:
    return dict(zip(NAMES, dense_features(request_of(prompt), 4).tolist(), strict=True))


# Lone surrogates, digits of every script and control characters included.
any_text = st.text(st.characters(codec=None), max_size=400)


@given(any_text, st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), any_text), max_size=4))
def test_every_text_has_finite_features(text: str, turns: list[tuple[str, str]]) -> None:
    request = RouterRequest(turns=(*turns, ("user", text)))
    values = dense_features(request, 4)
    assert values.shape == (len(NAMES),)
    assert np.isfinite(values).all()


@pytest.mark.parametrize("unit", ["a", "1", "1 ", "\"'", "((((", "\ud800", "Zürich 1,234.5 ", "\n"])
def test_a_megabyte_has_features_of_its_head_and_tail(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    clipped = clip(text)
    assert len(clipped) <= HEAD_CHARS + TAIL_CHARS + 1
    values = named(text)
    assert values["num_chars"] == pytest.approx(np.log1p(len(text)), rel=1e-5)
    assert values["num_words"] == pytest.approx(np.log1p(len(words(clipped))), rel=1e-5)


def test_features_say_what_they_are_named_after() -> None:
    easy, hard = named("What is 3 plus 4?"), named("What is 38172 times 9471, minus 12?")
    assert hard["max_number_digits"] == 5
    assert hard["second_number_digits"] == 4
    assert easy["max_number_digits"] == 1
    assert hard["max_number_log10"] == pytest.approx(np.log10(38173), rel=1e-5)
    assert named("Prove why this holds")["group_reasoning"] > named("Name this colour")["group_reasoning"]
    assert named("Did Ada Lovelace meet Charles Babbage?")["num_entities"] == pytest.approx(np.log1p(4))
    assert named('Reverse "alphabet" please')["max_quoted_chars"] == pytest.approx(np.log1p(8))
    assert named("If it rains, what then? And if not, why?")["question_depth"] > named("Rain?")["question_depth"]
    assert named("def f(x): return x  # python function")["group_code"] > 0


def test_other_turns_count_as_context() -> None:
    alone = dense_features(request_of("And now?"), 4)
    request = RouterRequest(
        turns=(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "And now?"))
    )
    within = dict(zip(NAMES, dense_features(request, 4).tolist(), strict=True))
    assert within["num_system_chars"] == pytest.approx(np.log1p(9))
    assert within["num_context_chars"] == pytest.approx(np.log1p(7))
    assert within["num_turns"] > alone[NAMES.index("num_turns")]


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_history_is_signed_and_shrunk(right: float, wrong: float) -> None:
    value = history_features({2: (right, right + wrong)}, 3)
    assert value[0] == value[2] == 0.0
    assert np.isfinite(value[1])
    assert value[1] * (right - wrong) >= 0


def test_little_history_says_little() -> None:
    one, many = history_features({1: (1, 1)}, 1), history_features({1: (50, 50)}, 1)
    assert 0 < one[0] < 0.5 < 2 < many[0]


def test_broken_history_is_bounded() -> None:
    assert np.isfinite(history_features({1: (9.0, 3.0), 2: (-5.0, -1.0)}, 2)).all()
