"""Drawing tokens: against transformers' definitions, against probabilities, and independent of the neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from engine.errors import NonFiniteLogits, NothingAllowed
from engine.logit_filters import filter_logits
from engine.request import Request, SamplingParams
from engine.rng import uniform
from engine.sampler import LogitsRow, Sampler, draw, token_logprobs
from engine.sequence import Sequence

VOCAB = 40


def sequence(sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> Sequence:
    request = Request("r", tuple(prompt or [1, 2, 3]), sampling)
    seed = 12345 if sampling.seed is None else sampling.seed
    made = Sequence(request, order=1, arrival_s=0.0, max_output=99, seed=seed, stop_ids=frozenset({0}))
    made.token_ids += output or []
    return made


def logits_of(rows: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(logits: Tensor, *sequences: Sequence) -> Tensor:
    sampler, rows = Sampler(VOCAB), [LogitsRow(each) for each in sequences]
    return sampler.probabilities(sampler.edit(logits, rows, {}), rows)


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"temperature": 0.7}, [("TemperatureLogitsWarper", {"temperature": 0.7})]),
        ({"top_k": 5}, [("TopKLogitsWarper", {"top_k": 5})]),
        ({"top_p": 0.6}, [("TopPLogitsWarper", {"top_p": 0.6})]),
        ({"min_p": 0.1}, [("MinPLogitsWarper", {"min_p": 0.1})]),
        (
            {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
            [
                ("TemperatureLogitsWarper", {"temperature": 1.3}),
                ("TopKLogitsWarper", {"top_k": 12}),
                ("TopPLogitsWarper", {"top_p": 0.8}),
            ],
        ),
    ],
)
def test_filters_are_those_of_transformers(options: dict[str, Any], warpers: list[tuple[str, dict[str, Any]]]) -> None:
    import transformers.generation.logits_process as theirs

    for seed in range(20):
        logits = logits_of(1, seed)
        expected = logits
        for name, arguments in warpers:
            expected = getattr(theirs, name)(**arguments)(torch.tensor([[1]]), expected)
        ours = probabilities(logits, sequence(SamplingParams(**options)))
        torch.testing.assert_close(ours, torch.softmax(expected, -1), atol=1e-6, rtol=1e-5)


limits = st.builds(
    SamplingParams,
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 7, 8, 9, 30, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 1e-3, 0.05, 1.0]),
)


@given(st.lists(limits, min_size=1, max_size=6), st.integers(0, 100), st.sampled_from([0.1, 1.0, 8.0]))
@settings(max_examples=300, deadline=None)
def test_looking_at_the_likeliest_first_filters_as_a_whole_sort_does(
    many: list[SamplingParams], seed: int, scale: float
) -> None:
    logits = logits_of(len(many), seed, scale)
    first, whole = filter_logits(logits, many, num_candidates=8), filter_logits(logits, many, num_candidates=VOCAB)
    assert torch.equal(first.isfinite(), whole.isfinite())
    for row, each in enumerate(many):
        assert torch.equal(first[row : row + 1], filter_logits(logits[row : row + 1], [each], num_candidates=8))


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = logits_of(1)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 3, 9, 9]]), logits)
    ours = probabilities(logits, sequence(SamplingParams(repetition_penalty=1.7), [1, 2, 3], [9, 9]))
    torch.testing.assert_close(ours, torch.softmax(expected, -1))


def test_presence_and_frequency_count_the_output_and_follow_it() -> None:
    logits = logits_of(1)
    made = sequence(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [4, 4], [9, 9, 7])
    expected = logits.clone()
    expected[0, 9] -= 0.5 + 2 * 0.25
    expected[0, 7] -= 0.5 + 0.25
    torch.testing.assert_close(probabilities(logits, made), torch.softmax(expected, -1))
    made.token_ids += [4, 7]
    expected[0, 4] -= 0.5 + 0.25
    expected[0, 7] -= 0.25
    torch.testing.assert_close(probabilities(logits, made), torch.softmax(expected, -1))
    # Drafts count as output for the rows behind them, and leave no trace.
    sampler = Sampler(VOCAB)
    behind = sampler.edit(logits, [LogitsRow(made, (11,))], {})
    assert float(behind[0, 11]) == pytest.approx(float(logits[0, 11]) - 0.75)
    torch.testing.assert_close(probabilities(logits, made), torch.softmax(expected, -1))


@pytest.mark.parametrize("bias", [100.0, 1e9, 1e38])
def test_a_huge_bias_decides_without_breaking_anything(bias: float) -> None:
    for sign, token in ((1, 17), (-1, None)):
        made = sequence(SamplingParams(temperature=1.0, logit_bias={17: sign * bias}))
        probs = probabilities(logits_of(1), made)
        assert probs.isfinite().all()
        assert float(probs[0, 17]) == pytest.approx(1.0 if token else 0.0, abs=1e-6)


def test_end_of_sequence_waits_for_min_tokens() -> None:
    logits = logits_of(1)
    logits[0, 0] = 50.0
    for num_output, chosen in ((0, False), (2, False), (3, True)):
        made = sequence(SamplingParams(temperature=0.0, min_tokens=3), output=[5] * num_output)
        assert (Sampler(VOCAB).sample(logits, [LogitsRow(made)])[0].token_id == 0) is chosen


options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.2, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 7: -100.0}]),
    seed=st.integers(-5, 5),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 2]),
)


@given(st.lists(options, min_size=2, max_size=6), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_a_draw_does_not_depend_on_the_neighbours(many: list[SamplingParams], seed: int) -> None:
    logits = logits_of(len(many), seed)
    sequences = [sequence(each, output=[4, 5, 4]) for each in many]
    together = Sampler(VOCAB).sample(logits.clone(), [LogitsRow(each) for each in sequences])
    for index, each in enumerate(sequences):
        each.sampler_state = None
        alone = Sampler(VOCAB).sample(logits[index : index + 1].clone(), [LogitsRow(each)])[0]
        assert alone == together[index]


@given(options, st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_a_drawn_token_was_allowed(sampling: SamplingParams, seed: int) -> None:
    logits = logits_of(1, seed)
    made = sequence(sampling, output=[4, 5, 4])
    token = Sampler(VOCAB).sample(logits.clone(), [LogitsRow(made)])[0].token_id
    assert float(probabilities(logits, made)[0, token]) > 0.0


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.125, 0.125]]).expand(4000, 5)
    drawn = torch.tensor(draw(probs, [uniform(7, position) for position in range(4000)]))
    counts = drawn.bincount(minlength=5)
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    expected = (probs[0][kept].double() * 4000).tolist()
    assert stats.chisquare(counts[kept].tolist(), expected, sum_check=False).pvalue > 1e-3


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    for stream in range(3):
        for numbers in (
            [uniform(5, position, stream) for position in range(4000)],
            [uniform(seed, 5, stream) for seed in range(4000)],
        ):
            assert all(0.0 <= x < 1.0 for x in numbers)
            assert stats.kstest(numbers, "uniform").pvalue > 1e-3
            assert abs(float(torch.corrcoef(torch.tensor([numbers[:-1], numbers[1:]]))[0, 1])) < 0.06
    assert uniform(5, 5, 0) != uniform(5, 5, 1) != uniform(5, 6, 1)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_the_ends_of_the_unit_interval_draw_allowed_tokens() -> None:
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert draw(probs, [0.0]) == [1]
    assert draw(probs, [1.0 - 2.0**-52]) == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_fail_their_own_row_only(bad: float) -> None:
    for temperature in (0.0, 1.0):
        logits = logits_of(3)
        good = sequence(SamplingParams(temperature=temperature))
        clean = Sampler(VOCAB).sample(logits[:1].clone(), [LogitsRow(good)])[0]
        logits[1, 5] = bad
        draws = Sampler(VOCAB).sample(
            logits, [LogitsRow(good), LogitsRow(sequence(good.request.sampling)), LogitsRow(good)]
        )
        assert draws[0] == clean
        assert isinstance(draws[1].error, NonFiniteLogits)
        assert draws[2].error is None


def test_stop_tokens_before_the_least_length_may_not_rule_out_all() -> None:
    for temperature in (0.0, 1.0):
        made, closed = (
            Sequence(
                Request("r", (1, 2), SamplingParams(temperature=temperature, min_tokens=3)),
                order=1,
                arrival_s=0,
                max_output=9,
                seed=1,
                stop_ids=frozenset(stop_ids),
            )
            for stop_ids in (set(range(VOCAB)) - {8}, range(VOCAB))
        )
        draws = Sampler(VOCAB).sample(logits_of(2), [LogitsRow(made), LogitsRow(closed)])
        assert draws[0].token_id == 8
        assert draws[0].error is None
        assert isinstance(draws[1].error, NothingAllowed)


def test_logprobs_are_the_models_own_and_ranked() -> None:
    logits = logits_of(2)
    logprobs = torch.log_softmax(logits, -1)
    first, second = token_logprobs(logits, [5, 6], [0, 3])
    assert first.logprob == pytest.approx(float(logprobs[0, 5]))
    assert first.rank == int((logprobs[0] > logprobs[0, 5]).sum())
    assert first.top == ()
    values, ids = logprobs[1].topk(3)
    assert [token for token, _ in second.top] == ids.tolist()
    assert [logprob for _, logprob in second.top] == pytest.approx(values.tolist())
    # Temperature, bias and filters change what is drawn, not what is reported.
    sampling = SamplingParams(temperature=0.1, top_k=1, logit_bias={5: 100.0}, logprobs=1)
    reported = Sampler(VOCAB).sample(logits[:1].clone(), [LogitsRow(sequence(sampling))])[0]
    assert reported.token_id == 5
    assert reported.logprob is not None
    assert reported.logprob.logprob == pytest.approx(float(logprobs[0, 5]))
