"""Sampling with tensors for parameters against the engine's sampler, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.sampling import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    Penalties,
    SamplingTensors,
    count_tokens,
    mask_logits,
    probabilities,
    sample,
    uniforms,
)
from engine.request import Request, SamplingParams
from engine.rng import uniform
from engine.sampler import LogitsRow, Sampler
from engine.sequence import Sequence
from tests.engine.kernels.cases import generator

VOCAB = 300


def sequence_of(params: SamplingParams, output: list[int]) -> Sequence:
    request = Request("r", (1, 2, 3), params)
    made = Sequence(request, order=1, arrival_s=0.0, max_output=99, seed=params.seed or 0, stop_ids=frozenset({0, 5}))
    made.token_ids += output
    return made


def tensors_of(sequences: list[Sequence]) -> SamplingTensors:
    """Every stage on, whatever the rows ask for: a stage that is off for a row must change nothing."""
    all_params = [each.request.sampling for each in sequences]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    counts = torch.zeros(len(sequences), VOCAB, dtype=torch.int32)
    prompts = torch.zeros(len(sequences), VOCAB, dtype=torch.bool)
    bias_ids = torch.zeros(len(sequences), 3, dtype=torch.int64)
    bias_values = torch.zeros(len(sequences), 3)
    for row, each in enumerate(sequences):
        prompts[row, each.token_ids[: each.num_prompt]] = True
        for token in each.token_ids[each.num_prompt :]:
            counts[row, token] += 1
        for place, (token, bias) in enumerate(each.request.sampling.logit_bias.items()):
            bias_ids[row, place], bias_values[row, place] = token, bias
    return SamplingTensors(
        temperature=column([p.temperature for p in all_params]),
        seeds=torch.tensor([each.seed for each in sequences]),
        positions=torch.tensor([len(each.token_ids) for each in sequences]),
        min_p=column([p.min_p for p in all_params]),
        top_k=torch.tensor([p.top_k for p in all_params]),
        top_p=column([p.top_p for p in all_params]),
        penalties=Penalties(
            column([p.presence_penalty for p in all_params]),
            column([p.frequency_penalty for p in all_params]),
            column([p.repetition_penalty for p in all_params]),
            torch.arange(len(sequences)),
            counts,
            prompts,
        ),
        bias_ids=bias_ids,
        bias_values=bias_values,
        banned_ids=torch.tensor([[0, 5]] * len(sequences)),
        banned_until=torch.tensor([each.num_prompt + each.request.sampling.min_tokens for each in sequences]),
    )


ROWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.8, seed=2),
    SamplingParams(top_p=0.6, seed=3),
    SamplingParams(min_p=0.1, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, logit_bias={7: 50.0, 9: -100.0}),
    SamplingParams(temperature=0.0, min_tokens=9, logit_bias={5: 80.0}),
    SamplingParams(temperature=2.0, top_k=1, seed=5),
]


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**31), stream=st.integers(0, 3))
def test_random_numbers_are_the_engines_bit_for_bit(seed: int, position: int, stream: int) -> None:
    ours = uniforms(torch.tensor([seed]), torch.tensor([position]), stream)
    assert ours.item() == uniform(seed, position, stream)


@pytest.mark.parametrize("step", range(20))
def test_tokens_and_logprobs_are_the_engines(step: int) -> None:
    sequences = [sequence_of(params, [7, 7, 20, 3][: step % 5]) for params in ROWS]
    for each in sequences:
        each.seed += 100 * step
    logits = torch.randn(len(ROWS), VOCAB, generator=generator(step)) * 3
    theirs = Sampler(VOCAB).sample(logits.clone(), [LogitsRow(each) for each in sequences])
    ours = sample(logits, tensors_of(sequences))
    assert ours.token_ids.tolist() == [drawn.token_id for drawn in theirs]
    assert not ours.errors.any()


def test_probabilities_are_the_engines() -> None:
    sequences = [sequence_of(params, [7, 7]) for params in ROWS]
    logits = torch.randn(len(ROWS), VOCAB, generator=generator(0)) * 3
    params = tensors_of(sequences)
    theirs = Sampler(VOCAB).probabilities(logits, [LogitsRow(each) for each in sequences])
    drawn = [row for row, each in enumerate(ROWS) if each.temperature > 0]
    torch.testing.assert_close(probabilities(logits, params)[drawn], theirs[drawn])


def test_logprobs_are_of_the_unedited_logits() -> None:
    logits = torch.randn(2, VOCAB, generator=generator(0))
    params = SamplingTensors(
        bias_ids=torch.tensor([[4], [4]]), bias_values=torch.tensor([[90.0], [0.0]]), positions=torch.tensor([3, 3])
    )
    sampled = sample(logits, params, num_logprobs=5)
    exact = logits.log_softmax(-1)
    assert sampled.token_ids[0] == 4
    assert sampled.logprobs is not None
    torch.testing.assert_close(sampled.logprobs, exact.gather(1, sampled.token_ids[:, None]).squeeze(1))
    assert sampled.ranks is not None
    assert sampled.ranks.tolist() == [int((exact[0] > exact[0, 4]).sum()), 0]
    assert sampled.top_ids is not None
    assert sampled.top_ids.tolist() == exact.topk(5).indices.tolist()


def test_a_bad_row_is_told_and_the_others_are_as_if_it_were_not_there() -> None:
    logits = torch.randn(4, VOCAB, generator=generator(0))
    best = logits.argmax(-1)
    logits[1, 17] = math.nan
    logits[3, 17] = math.inf
    bias = torch.zeros(4, VOCAB)
    bias[2] = -math.inf
    params = SamplingTensors(bias_ids=torch.arange(VOCAB).expand(4, -1), bias_values=bias)
    sampled = sample(logits, params)
    assert sampled.errors.tolist() == [0, NOT_FINITE, NOTHING_ALLOWED, NOT_FINITE]
    assert sampled.token_ids[0] == best[0]
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all()


def test_drawn_tokens_are_counted_for_the_next_step() -> None:
    zeros = torch.zeros(2)
    penalties = Penalties(
        zeros,
        zeros,
        zeros + 1,
        torch.tensor([2, 0]),
        torch.zeros(3, VOCAB, dtype=torch.int32),
        torch.zeros(3, VOCAB) > 0,
    )
    count_tokens(penalties, torch.tensor([5, 6]))
    count_tokens(penalties, torch.tensor([5, 5]))
    assert penalties.counts[2, 5] == 2
    assert penalties.counts[0].nonzero().flatten().tolist() == [5, 6]


def test_masks_rule_out_what_has_no_bit() -> None:
    logits = torch.randn(3, 70)
    allowed = torch.rand(3, 96) < 0.5
    allowed[1] = True
    words = (allowed.view(3, 3, 32).long() << torch.arange(32)).sum(dim=-1)
    masks = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    expected = logits.masked_fill(~allowed[:, :70], -math.inf)
    mask_logits(logits, masks)
    assert torch.equal(logits, expected)
