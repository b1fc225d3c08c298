"""Speculation is lossless: the same greedy tokens, the same seeded tokens, the same distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.config import EngineConfig
from engine.draft_verifier import accept_draft
from engine.drafter import Drafter, ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.kv_cache import KVCache
from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.sink import QueueSink
from engine.speculator import Speculator
from engine.step_costs import StepCosts
from tests.engine.toy import ToyModel

CONFIG = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=32)
prompts = st.lists(st.integers(1, 22), min_size=1, max_size=20)


def model_drafter(draft: ToyModel, *, num_blocks: int = 64, vocab_size: int = 23) -> ModelDrafter:
    return ModelDrafter(draft, KVCache(draft.config, num_blocks, 4), vocab_size=vocab_size, max_batch_tokens=16)


def serve(
    model: ToyModel, drafter: Drafter | None, requests: list[Request], config: EngineConfig = CONFIG, k: int = 4
) -> list[Result]:
    speculator = None if drafter is None else Speculator(drafter, max_draft_tokens=k, adaptive=False)
    engine = Engine(model, config, start=False, speculator=speculator)
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    if isinstance(drafter, ModelDrafter):
        drafter.pool.check_integrity([])
    return [collect(sink, 1.0) for sink in sinks]


def make_drafter(kind: str, seed: int) -> Drafter:
    if kind == "ngram":
        return NGramDrafter(longest=3, shortest=1)
    return model_drafter(ToyModel(seed, blur={"twin": 0.0, "blurred": 2.0}[kind]))


@pytest.mark.parametrize("kind", ["twin", "blurred", "ngram"])
@given(many=st.lists(prompts, min_size=1, max_size=5), seed=st.integers(0, 3), k=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_greedy_output_is_the_targets_own(kind: str, many: list[list[int]], seed: int, k: int) -> None:
    model = ToyModel(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=14, logprobs=1)
    requests = [Request(str(i), tuple(p), sampling) for i, p in enumerate(many)]
    for result, plain, prompt in zip(
        serve(model, make_drafter(kind, seed), requests, k=k), serve(model, None, requests), many, strict=True
    ):
        assert list(result.token_ids) == model.greedy(prompt, 14)
        assert result.logprobs == plain.logprobs
        if kind == "twin":
            assert result.ending.num_accepted_tokens >= result.ending.num_draft_tokens - k


@pytest.mark.parametrize("kind", ["twin", "blurred", "ngram"])
def test_every_option_of_sampling_with_a_seed_is_unchanged(kind: str) -> None:
    model = ToyModel(1)
    shared = {"max_tokens": 30, "ignore_eos": True, "logprobs": 2}
    variants = [
        SamplingParams(temperature=1.0, seed=3, **shared),
        SamplingParams(temperature=0.7, seed=4, top_p=0.8, top_k=9, **shared),
        SamplingParams(temperature=1.2, seed=5, min_p=0.05, repetition_penalty=1.2, **shared),
        SamplingParams(temperature=0.0, presence_penalty=0.9, frequency_penalty=0.4, **shared),
        SamplingParams(temperature=0.9, seed=6, logit_bias={5: 2.0, 6: -50.0}, min_tokens=9, **shared),
    ]
    requests = [Request(str(i), (1, 2, 3, 1, 2), sampling) for i, sampling in enumerate(variants)]
    plain, drafted = serve(model, None, requests), serve(model, make_drafter(kind, 1), requests)
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]
    assert [r.logprobs for r in plain] == [r.logprobs for r in drafted]
    assert sum(r.ending.num_draft_tokens for r in drafted) > 0


def test_a_crowded_pool_preempts_and_changes_nothing() -> None:
    model = ToyModel(2)
    tight = EngineConfig(block_size=4, num_blocks=22, max_num_seqs=4, max_batch_tokens=20)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [Request(str(i), (i + 1, 2, 3, 4, 5), sampling) for i in range(6)]
    # The drafter's own pool is too small for all of them as well.
    results = serve(model, model_drafter(ToyModel(2, blur=1.0), num_blocks=14), requests, tight)
    for request, result in zip(requests, results, strict=True):
        assert list(result.token_ids) == model.greedy(list(request.prompt_ids), 30, eos=False)
    assert sum(r.ending.num_preemptions for r in results) > 0
    assert sum(r.ending.num_draft_tokens for r in results) > 0


def test_stops_inside_a_draft_end_the_request_there() -> None:
    model = ToyModel(3)
    free = model.greedy([5, 6], 30, eos=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(free[9],))
    result = serve(model, model_drafter(ToyModel(3)), [Request("r", (5, 6), sampling)])[0]
    assert list(result.token_ids) == free[: free.index(free[9]) + 1]
    for length in range(1, 9):
        limited = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        assert (
            list(serve(model, model_drafter(ToyModel(3)), [Request("r", (5, 6), limited)])[0].token_ids)
            == (free[:length])
        )


@pytest.mark.parametrize("seed", range(6))
def test_rejection_sampling_draws_from_the_target(seed: int) -> None:
    """Chi-square of the first two tokens, target and draft random, with zeros in both."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(3, 5, generator=generator) ** 3
    draft = torch.rand(2, 5, generator=generator) ** 3
    target[0, seed % 5] = 0.0
    draft[0, (seed + 1) % 5] = 0.0
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    draws = torch.multinomial(draft, 6000, replacement=True, generator=generator).T.tolist()
    first, second = Counter[int](), Counter[int]()
    for number, drafted in enumerate(draws):
        tokens = accept_draft(drafted, draft, target, seed=seed * 10_000 + number, position=0)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    for counts, row in ((first, 0), (second, 1)):
        total = sum(counts.values())
        assert total > 200
        possible = [t for t in range(5) if target[row, t] > 0]
        assert set(counts) <= set(possible)
        expected = [float(target[row, t]) * total for t in possible]
        assert stats.chisquare([counts[t] for t in possible], expected, sum_check=False).pvalue > 1e-3


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing() -> None:
    same = torch.tensor([[0.2, 0.3, 0.5]]).expand(4, 3)
    for seed in range(200):
        assert accept_draft([0, 1, 2], same[:3], same, seed=seed, position=9)[:3] == [0, 1, 2]
    target = torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3)
    draft = torch.tensor([[0.0, 1.0, 0.0]])
    assert all(accept_draft([1], draft, target, seed=seed, position=0) == [0] for seed in range(50))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blurred", "ngram"])
def test_sampled_output_follows_the_targets_distribution(kind: str) -> None:
    """The whole engine, unseeded, on a vocabulary of 6: pairs of tokens against exact probabilities."""
    model = ToyModel(5, vocab_size=6)
    drafter = (
        NGramDrafter(longest=2, shortest=1)
        if kind == "ngram"
        else model_drafter(ToyModel(5, vocab_size=6, blur=2.5), vocab_size=6)
    )
    sampling = SamplingParams(temperature=1.1, max_tokens=4, ignore_eos=True)
    # The first token is never drafted, so the pair of the second and third is what was speculated.
    requests = [Request(str(i), (1, 2, 1, 3, 1, 2), sampling) for i in range(3000)]
    config = EngineConfig(block_size=4, num_blocks=256, max_num_seqs=32, max_batch_tokens=256, max_waiting=4000)
    results = serve(model, drafter, requests, config, k=3)
    assert 0 < sum(r.ending.num_accepted_tokens for r in results) < sum(r.ending.num_draft_tokens for r in results)
    observed = Counter(r.token_ids[1:3] for r in results)
    expected: Counter[tuple[int, ...]] = Counter()
    prefix = [1, 2, 1, 3, 1, 2]
    for a, p_a in enumerate(_next(model, prefix)):
        for b, p_b in enumerate(_next(model, [*prefix, a])):
            for c, p_c in enumerate(_next(model, [*prefix, a, b])):
                expected[b, c] += p_a * p_b * p_c  # type: ignore[assignment]
    common = [pair for pair in expected if expected[pair] * 3000 >= 5]
    rare = 3000 - sum(observed[pair] for pair in common)
    counts = [*(observed[pair] for pair in common), rare]
    wanted = [*(expected[pair] * 3000 for pair in common), 3000 - sum(expected[pair] * 3000 for pair in common)]
    assert stats.chisquare(counts, wanted, sum_check=False).pvalue > 1e-3


def _next(model: ToyModel, tokens: list[int]) -> list[float]:
    probs: list[float] = torch.softmax(model.reference(tokens)[-1].double() / 1.1, -1).tolist()
    return probs


def test_drafts_cost_passes_and_catching_up_is_counted() -> None:
    draft = ToyModel(3)
    drafter = model_drafter(draft)
    sampling = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    result = serve(ToyModel(3), drafter, [Request("r", tuple(range(1, 20)), sampling)], k=4)[0]
    # One token from the prompt's prefill, then 4 drafts and a bonus per step, each step 4 draft passes; the first also
    # reads the prompt of 20 tokens in chunks of 16.
    assert result.ending.num_draft_tokens == result.ending.num_accepted_tokens == 16
    assert draft.num_forwards == 1 + 4 * 4


def test_ngrams_continue_the_latest_match() -> None:
    made = Sequence(Request("r", (1, 2, 3, 9, 1, 2, 4, 8, 1, 2)), order=1, arrival_s=0, max_output=50, seed=0)
    drafter = NGramDrafter(longest=3, shortest=2)
    drafter.propose([made], [3])
    assert made.draft_ids == [4, 8, 1]
    made.token_ids += [3]
    drafter.propose([made], [2])
    assert made.draft_ids == [9, 1]
    made.token_ids += [20]
    drafter.propose([made], [2])
    assert made.draft_ids == []


# How many to draft


def decoding(acceptance: float | None = None, count: int = 1) -> list[Sequence]:
    made = []
    for index in range(count):
        each = Sequence(Request(str(index), (1, 2)), order=index, arrival_s=0, max_output=100, seed=0)
        each.token_ids.append(3)
        each.acceptance = acceptance
        made.append(each)
    return made


def speculator(target_s: dict[int, float], draft_s: dict[int, float], k: int = 5) -> Speculator:
    made = Speculator(NGramDrafter(), max_draft_tokens=k)
    for costs, points in ((made.target_costs, target_s), (made.draft_costs, draft_s)):
        for tokens, seconds in points.items():
            costs.observe(tokens, seconds)
    return made


def limits(made: Speculator, sequences: list[Sequence]) -> list[int]:
    made.set_limits(sequences)
    return [each.draft_limit for each in sequences]


FLAT = {1: 10e-3, 8: 10.5e-3, 64: 14e-3}  # bound by reading weights: more tokens cost little
STEEP = {1: 1e-3, 8: 8e-3, 64: 64e-3}  # bound by arithmetic: every token costs the same
CHEAP, DEAR = {1: 1e-3, 8: 1.1e-3}, {1: 9e-3, 8: 10e-3}


def test_drafts_grow_with_acceptance_and_stop_where_they_would_lose() -> None:
    lengths = [limits(speculator(FLAT, CHEAP), decoding(a))[0] for a in (0.02, 0.4, 0.7, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == 5
    assert limits(speculator(STEEP, CHEAP), decoding(0.7)) == [0]
    assert limits(speculator(FLAT, DEAR), decoding(0.7)) == [0]


def test_each_sequence_has_its_own_length_and_load_shortens_it() -> None:
    made = speculator(FLAT, CHEAP)
    mixed = [*decoding(0.95), *decoding(0.3), *decoding(0.0)]
    lengths = limits(made, mixed)
    assert lengths[0] > lengths[1] >= lengths[2] == 0
    busy = speculator({1: 10e-3, 8: 11e-3, 32: 30e-3, 64: 60e-3, 256: 240e-3}, CHEAP)
    assert max(limits(busy, decoding(0.7, count=48))) < max(limits(busy, decoding(0.7, count=1)))


@pytest.mark.parametrize(("target_s", "least", "most"), [(FLAT, 4, 10), (STEEP, 1, 3)])
def test_a_sequence_that_is_not_drafted_for_is_probed_now_and_then(
    target_s: dict[int, float], least: int, most: int
) -> None:
    """Seldom where not even a perfect drafter would pay: a probe costs something too."""
    made = speculator(target_s, CHEAP)
    (sequence,) = decoding(0.0)
    sequence.max_output = 3000
    probes = 0
    for _ in range(280 if target_s is FLAT else 1600):
        probes += limits(made, [sequence])[0]
        sequence.token_ids.append(3)
    assert least <= probes <= most


def test_where_all_are_padded_to_the_longest_draft_it_is_their_cost_that_counts() -> None:
    """One sequence of many that wants drafts makes all others' places longer."""
    costs = {1: 10e-3, 8: 10.5e-3, 64: 30e-3, 256: 120e-3}
    willing, others = decoding(0.9), decoding(0.9, count=30)
    for each in others:
        each.request = Request("r", (1, 2), speculate=False)
    made = speculator(costs, CHEAP)
    assert limits(made, [*willing, *decoding(0.0, count=3)])[0] > 0
    made.padded = lambda num_sequences, num_drafts: num_sequences * (num_drafts + 1)
    assert limits(made, [*willing, *others])[0] == 0
    assert limits(made, willing)[0] > 0
    made.set_limits(willing, other_tokens=7)
    assert willing[0].draft_limit == 0


def test_requests_can_decline_and_ends_are_respected() -> None:
    made = Speculator(NGramDrafter(), max_draft_tokens=5, adaptive=False)
    declined = Sequence(Request("r", (1,), speculate=False), order=1, arrival_s=0, max_output=50, seed=0)
    ending = Sequence(Request("r", (1,)), order=1, arrival_s=0, max_output=3, seed=0)
    ending.token_ids.append(2)
    assert limits(made, [declined, ending]) == [0, 1]


def test_costs_are_learned_and_interpolated() -> None:
    costs = StepCosts()
    assert costs.estimate(4) is None
    costs.observe(1, 2.0)
    assert costs.estimate(100) == 2.0
    for _ in range(5):
        costs.observe(16, 5.0)
    assert costs.estimate(1) == pytest.approx(2.0)
    assert costs.estimate(16) == pytest.approx(5.0)
    assert costs.estimate(6) == pytest.approx(3.0)
    assert costs.estimate(31) == pytest.approx(8.0)
    costs.observe(16, 5000.0)
    assert costs.estimate(16) < 7.0  # type: ignore[operator]


def test_acceptance_is_reported() -> None:
    model = ToyModel(1)
    made = Speculator(model_drafter(ToyModel(1, blur=1.0)), max_draft_tokens=3, adaptive=False)
    engine = Engine(model, CONFIG, start=False, speculator=made)
    sink = QueueSink()
    engine.submit(Request("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)), sink)
    while engine.has_work():
        engine.step()
    ending = collect(sink, 1.0).ending
    assert 0 < ending.num_accepted_tokens <= ending.num_draft_tokens
    assert made.num_drafted == ending.num_draft_tokens
    assert engine.stats().acceptance_rate is not None
