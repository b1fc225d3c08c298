"""A tier's own log-probabilities as a probability of being right, calibrated where that was measured."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier.artifact import RouterArtifact
from classifier.confidence import SIGNALS, AnswerConfidence, AnswerSignals, TierConfidence, fit_confidence
from classifier.errors import ArtifactCorrupt, TrainingError
from classifier.router import BUILTIN, ArtifactRouter


def drawn(count: int, seed: int) -> tuple[list[AnswerSignals], list[float], list[float]]:
    """Answers whose doubtful tokens make them wrong: their signals, their grades and the truth behind the grades."""
    rng = random.Random(seed)
    signals, right, truth = [], [], []
    for _ in range(count):
        doubts = [rng.expovariate(1.0) * (2.0 if rng.random() < 0.2 else 0.05) for _ in range(rng.randint(1, 30))]
        p = 1 / (1 + math.exp(-(2.5 - 1.2 * max(doubts))))
        signals.append(AnswerSignals.of([-doubt for doubt in doubts]))
        right.append(float(rng.random() < p))
        truth.append(p)
    return signals, right, truth


FITTED = fit_confidence({1: drawn(300, seed=4)[0]}, {1: drawn(300, seed=4)[1]})


def test_the_fit_is_calibrated_on_answers_it_never_saw() -> None:
    signals, right, _ = drawn(3000, seed=1)
    fitted = fit_confidence({2: signals}, {2: right})
    fresh, graded, truth = drawn(3000, seed=2)
    found = [fitted.p_right(2, each) for each in fresh]
    assert sum(found) == pytest.approx(sum(graded), rel=0.05)
    # Within bins of what it says, what it says is what happens.
    for low, high in ((0.0, 0.4), (0.4, 0.7), (0.7, 0.95)):
        inside = [i for i, p in enumerate(found) if low <= p < high]
        assert len(inside) > 100
        said = sum(found[i] for i in inside) / len(inside)
        happened = sum(graded[i] for i in inside) / len(inside)
        assert abs(said - happened) < 0.08
    assert fitted.tiers[2].auc > 0.7
    assert fitted.tiers[2].brier < 0.25
    assert max(abs(p - q) for p, q in zip(found, truth, strict=True)) < 0.5


def test_answers_that_are_nearly_certain_are_told_from_those_that_are_all_but() -> None:
    """Wrong ones in a thousand, not in thirty, where the doubt is a thousandth of a doubt."""
    rng = random.Random(6)
    signals, right = [], []
    for _ in range(4000):
        doubt = 10 ** rng.uniform(-4, 1)
        signals.append(AnswerSignals.of([-doubt]))
        right.append(float(rng.random() < 1 / (1 + (2 * doubt))))
    fitted = fit_confidence({1: signals}, {1: right})
    assert fitted.p_right(1, AnswerSignals.of([-1e-4])) > 0.995
    assert 0.97 < fitted.p_right(1, AnswerSignals.of([-1e-2])) < 0.99
    assert 0.75 < fitted.p_right(1, AnswerSignals.of([-0.1])) < 0.88


def test_calibrations_of_other_signals_are_still_read() -> None:
    tier = TierConfidence((1.0, 2.0), 0.5, 100, 0.9, 0.1)
    older = AnswerConfidence({1: tier}, ("total", "mean"))
    answer = AnswerSignals.of([-0.25, -0.75])
    assert AnswerConfidence.from_json(older.to_json()) == older
    assert older.p_right(1, answer) == pytest.approx(1 / (1 + math.exp(1.0 + 1.0 - 0.5)))


def test_tiers_with_too_little_to_go_by_are_left_out() -> None:
    signals, right, _ = drawn(200, seed=3)
    few = fit_confidence({1: signals, 2: signals[:50], 3: signals}, {1: right, 2: right[:50], 3: [1.0] * 200})
    assert set(few.tiers) == {1}
    with pytest.raises(TrainingError):
        fit_confidence({1: signals}, {1: right[:-1]})


@given(st.lists(st.floats(-1e6, 0.0), max_size=50))
def test_whatever_the_answer_the_confidence_is_a_probability(logprobs: list[float]) -> None:
    answer = AnswerSignals.of(logprobs)
    for tier in (1, 9):
        assert 0.0 <= FITTED.p_right(tier, answer) <= 1.0
    # Without a calibration: the mean probability of a token, and none at all for an answer without tokens.
    expected = math.exp(math.fsum(logprobs) / len(logprobs)) if logprobs else 0.0
    assert FITTED.p_right(9, answer) == pytest.approx(expected)


def test_it_travels_in_a_routers_artifact_and_bad_numbers_are_refused() -> None:
    signals, right, _ = drawn(300, seed=5)
    fitted = fit_confidence({1: signals}, {1: right})
    artifact = RouterArtifact.load(BUILTIN)
    router = ArtifactRouter(artifact.with_metadata(confidence=fitted.to_json()))
    assert router.confidence == fitted
    assert ArtifactRouter(artifact.with_metadata(confidence={})).confidence == AnswerConfidence()
    described = fitted.to_json()
    for broken in (
        described | {"signals": ["length"]},
        {"tiers": described["tiers"]},
        described | {"signals": [*SIGNALS, "length"]},
        described | {"tiers": {"1": described["tiers"]["1"] | {"weights": [1.0]}}},
        described | {"tiers": {"one": described["tiers"]["1"]}},
        described | {"tiers": {"1": {"weights": [0.0] * 4}}},
        described | {"signals": ["total"]},
    ):
        with pytest.raises(ArtifactCorrupt):
            ArtifactRouter(artifact.with_metadata(confidence=broken))
