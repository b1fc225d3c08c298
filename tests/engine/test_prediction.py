"""Predicted answers are only ever a faster way to the same answer."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.config import EngineConfig
from engine.drafter import NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import InvalidRequest
from engine.prediction import FIRST_CHECK, LONGEST_CHECK, MOST_CHECKED, PredictionCursor
from engine.request import FinishReason, Prediction, Request, SamplingParams, ThinkingBudget
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.test_draft_verifier import model_drafter
from tests.engine.toy import ToyModel

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


# The engine


CONFIG = EngineConfig(block_size=4, num_blocks=96, max_num_seqs=4, max_batch_tokens=48)
TIGHT = EngineConfig(block_size=4, num_blocks=24, max_num_seqs=4, max_batch_tokens=20)
NUM_TOKENS = 24


def serve(
    model: ToyModel,
    requests: list[Request],
    config: EngineConfig = CONFIG,
    *,
    is_asynchronous: bool = False,
    drafter: str = "none",
) -> list[Result]:
    made = {"none": None, "ngram": NGramDrafter(longest=3, shortest=1), "model": model_drafter(ToyModel(1, blur=1.5))}
    speculator = None if drafter == "none" else Speculator(made[drafter], max_draft_tokens=3, adaptive=False)
    options = {name: getattr(config, name) for name in ("block_size", "num_blocks", "max_num_seqs", "max_batch_tokens")}
    engine = Engine(model, EngineConfig(**options, asynchronous=is_asynchronous), start=False, speculator=speculator)
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return [collect(sink, 1.0) for sink in sinks]


def spoil(answer: list[int], rng: random.Random) -> tuple[int, ...]:
    """An answer with some of its tokens replaced, dropped or doubled: a prediction that is partly right."""
    spoiled: list[int] = []
    for token in answer:
        kind = rng.choice(["keep"] * 8 + ["replace", "drop", "double"])
        spoiled += {"keep": [token], "replace": [rng.randrange(23)], "drop": [], "double": [token, token]}[kind]
    return tuple(spoiled)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@given(seed=st.integers(0, 10_000), is_tight=st.booleans())
@settings(max_examples=20, deadline=None)
def test_greedy_output_is_the_models_own_whatever_is_predicted(
    drafter: str, is_asynchronous: bool, seed: int, is_tight: bool
) -> None:
    rng, model = random.Random(seed), ToyModel(seed % 4)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1)
    many = [[rng.randint(1, 22) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 6))]
    own = [model.greedy(prompt, NUM_TOKENS) for prompt in many]
    requests = []
    for place, (prompt, answer) in enumerate(zip(many, own, strict=True)):
        wrong = tuple(rng.randrange(23) for _ in range(rng.randint(0, 40)))
        predicted = rng.choice([None, tuple(answer), spoil(answer, rng), wrong])
        prediction = None if predicted is None else Prediction(predicted)
        requests.append(Request(str(place), tuple(prompt), sampling, prediction=prediction))
    config = TIGHT if is_tight else CONFIG
    plain = [Request(each.request_id, each.prompt_ids, sampling) for each in requests]
    found = serve(model, requests, config, is_asynchronous=is_asynchronous, drafter=drafter)
    for result, alone, answer in zip(found, serve(model, plain), own, strict=True):
        assert list(result.token_ids) == answer
        assert result.logprobs == alone.logprobs
        assert result.ending.num_accepted_predicted_tokens <= result.ending.num_predicted_tokens


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_every_option_of_sampling_is_unchanged(is_asynchronous: bool) -> None:
    model = ToyModel(1)
    shared = {"max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    variants = [
        SamplingParams(temperature=1.0, seed=3, **shared),
        SamplingParams(temperature=0.7, seed=4, top_p=0.8, top_k=9, **shared),
        SamplingParams(temperature=1.2, seed=5, min_p=0.05, repetition_penalty=1.2, **shared),
        SamplingParams(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.4, **shared),
        SamplingParams(temperature=0.9, seed=6, logit_bias={5: 2.0, 6: -50.0}, min_tokens=9, **shared),
    ]
    plain = serve(model, [Request(str(i), (1, 2, 3), each) for i, each in enumerate(variants)])
    rng = random.Random(0)
    for make in (tuple, lambda ids: spoil(list(ids), rng)):
        requests = [
            Request(str(i), (1, 2, 3), each, prediction=Prediction(make(result.token_ids)))
            for i, (each, result) in enumerate(zip(variants, plain, strict=True))
        ]
        found = serve(model, requests, is_asynchronous=is_asynchronous)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
        assert [each.logprobs for each in found] == [each.logprobs for each in plain]


def test_unseeded_draws_stand_only_where_they_are_the_targets_own() -> None:
    """The first token is drawn as often as the model says, though one token was predicted for all."""
    model = ToyModel(5, vocab_size=6)
    sampling = SamplingParams(temperature=1.1, max_tokens=2, ignore_eos=True)
    config = EngineConfig(block_size=4, num_blocks=256, max_num_seqs=32, max_batch_tokens=256)
    requests = [Request(str(i), (1, 2, 1, 3), sampling, prediction=Prediction((4, 4))) for i in range(3000)]
    found = Counter(each.token_ids[0] for each in serve(model, requests[:1000], config))
    found += Counter(each.token_ids[0] for each in serve(model, requests[:1000], config))
    expected = torch.softmax(model.reference([1, 2, 1, 3])[-1].double() / 1.1, -1).tolist()
    counts = [found[token] for token in range(6)]
    assert stats.chisquare(counts, [p * 2000 for p in expected]).pvalue > 1e-3


def test_a_right_prediction_saves_the_steps() -> None:
    model = ToyModel(2)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    own = model.greedy([1, 2, 3], 40, eos=False)
    plain = ToyModel(2)
    serve(plain, [Request("r", (1, 2, 3), sampling)])
    assert plain.num_forwards == 40
    result = serve(model, [Request("r", (1, 2, 3), sampling, prediction=Prediction(tuple(own)))])[0]
    # Prompt and 32 predicted tokens, one drawn; then 6 of the 7 that are left, and the last drawn.
    assert list(result.token_ids) == own
    assert model.num_forwards == 2
    assert result.ending.num_accepted_predicted_tokens == 40
    assert result.ending.num_draft_tokens == 0


def test_prompt_and_prediction_in_chunks_under_the_budget() -> None:
    model = ToyModel(3)
    prompt = [i % 22 + 1 for i in range(50)]
    own = model.greedy(prompt, 60, eos=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    small = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=2, max_batch_tokens=16)
    before = model.num_forwards
    result = serve(model, [Request("r", tuple(prompt), sampling, prediction=Prediction(tuple(own)))], small)[0]
    assert list(result.token_ids) == own
    assert model.num_forwards - before < 12


def test_many_predictions_at_once_share_what_a_step_may_check() -> None:
    model = ToyModel(3)
    prompt, sampling = (5, 6), SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    own = tuple(model.greedy(list(prompt), 80, eos=False))
    wide = EngineConfig(block_size=4, num_blocks=600, max_num_seqs=16, max_batch_tokens=2048)
    engine = Engine(model, wide, start=False)
    sinks = [QueueSink() for _ in range(12)]
    for place, sink in enumerate(sinks):
        engine.submit(Request(str(place), prompt, sampling, prediction=Prediction(own), cache_salt=str(place)), sink)
    most = 0
    while engine.has_work():
        before = model.num_tokens
        engine.step()
        most = max(most, model.num_tokens - before)
    # 12 prompts of 2 tokens and as many predicted tokens as a step may check.
    assert most == 12 * 2 + MOST_CHECKED
    assert all(collect(sink, 1.0).token_ids == own for sink in sinks)


def test_the_answer_after_the_reasoning_is_what_was_predicted() -> None:
    model = ToyModel(4)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    thinking = ThinkingBudget(close_id=21, close_ids=(20, 21, 19), max_tokens=9)
    alone = serve(model, [Request("r", (5, 6), sampling, thinking=thinking)])[0].token_ids
    close = alone.index(21)
    prediction = Prediction(alone[close + 1 :], after_id=21)
    for is_asynchronous in (False, True):
        request = Request("r", (5, 6), sampling, thinking=thinking, prediction=prediction)
        before = model.num_forwards
        result = serve(model, [request], is_asynchronous=is_asynchronous)[0]
        assert result.token_ids == alone
        assert result.ending.num_accepted_predicted_tokens == len(prediction.token_ids)
        assert model.num_forwards - before < close + 6


def test_stops_and_cancellation_inside_a_prediction() -> None:
    model = ToyModel(3)
    free = model.greedy([5, 6], 30, eos=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(free[9],))
    predicted = Prediction(tuple(free))
    result = serve(model, [Request("r", (5, 6), sampling, prediction=predicted)])[0]
    assert list(result.token_ids) == free[: free.index(free[9]) + 1]
    for length in range(1, 9):
        limited = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        assert list(serve(model, [Request("r", (5, 6), limited, prediction=predicted)])[0].token_ids) == free[:length]
    engine = Engine(model, CONFIG, start=False)
    sink = QueueSink()
    endless = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    sequence = engine.submit(Request("r", (5, 6), endless, prediction=predicted), sink)
    engine.step()
    engine.cancel(sequence)
    while engine.has_work():
        engine.step()
    assert collect(sink, 1.0).ending.reason is FinishReason.CANCELLED
    assert engine.scheduler.pool.num_owned == 0


def test_a_prediction_of_unknown_tokens_is_refused() -> None:
    engine = Engine(ToyModel(), CONFIG, start=False)
    with pytest.raises(InvalidRequest, match="prediction has token id 99"):
        engine.submit(Request("r", (1,), prediction=Prediction((1, 99))), QueueSink())
