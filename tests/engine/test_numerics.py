"""Real arithmetic: served tokens are transformers' own, whatever the scheduler does on the way.

Weights are random, so the two likeliest tokens are rarely close: in float32 greedy tokens must be equal. Between
two runs of ours that compute the same row in different batch shapes, matrix products may differ in the last bits, so
log-probabilities are compared within 1e-4.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.drafter import ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.checkpoints import make_reference, save_reference

VARIANTS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
}
ROOMY = EngineConfig(block_size=8, num_blocks=128, max_num_seqs=8, max_batch_tokens=256)
PROMPTS = [[random.Random(n).randrange(3, 211) for _ in range(n)] for n in (1, 7, 8, 9, 23, 40, 64, 90)]
LENGTH = 24


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, DecoderModel]:
    reference = make_reference(request.param, **VARIANTS[request.param])
    folder = save_reference(reference, tmp_path_factory.mktemp(request.param))
    return reference, load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(save_reference(make_reference("Llama"), tmp_path_factory.mktemp("target")), dtype="float32")


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = save_reference(make_reference("Llama", seed=1, num_hidden_layers=1), tmp_path_factory.mktemp("draft"))
    return load_model(folder, dtype="float32")


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 0, **options})


def serve(
    model: DecoderModel,
    prompts: list[list[int]],
    sampling: SamplingParams,
    config: EngineConfig = ROOMY,
    engine: Engine | None = None,
    speculator: Speculator | None = None,
) -> list[Result]:
    engine = engine or Engine(model, config, start=False, speculator=speculator)
    sinks = [QueueSink() for _ in prompts]
    for index, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        engine.submit(Request(str(index), tuple(prompt), sampling), sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return [collect(sink, 1.0) for sink in sinks]


def assert_same(ours: list[Result], others: list[Result]) -> None:
    for one, other in zip(ours, others, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.logprobs] == pytest.approx([x.logprob for x in other.logprobs], abs=1e-4)


def test_served_tokens_and_logprobs_are_those_of_transformers(pair: tuple[Any, DecoderModel]) -> None:
    reference, model = pair
    config = EngineConfig(block_size=8, num_blocks=48, max_num_seqs=8, max_batch_tokens=19)
    results = serve(model, PROMPTS, sampled(), config)
    for prompt, result in zip(PROMPTS, results, strict=True):
        whole = torch.tensor([[*prompt, *result.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(whole).logits[0], -1)[len(prompt) - 1 : -1]
        assert list(result.token_ids) == logprobs.argmax(-1).tolist()
        expected = logprobs.gather(1, whole[0, len(prompt) :, None])[:, 0].tolist()
        assert [x.logprob for x in result.logprobs] == pytest.approx(expected, abs=1e-4)


def test_chunked_batched_crowded_and_cached_runs_equal_each_alone(pair: tuple[Any, DecoderModel]) -> None:
    _, model = pair
    alone = [serve(model, [prompt], sampled())[0] for prompt in PROMPTS]
    assert_same(serve(model, PROMPTS, sampled()), alone)
    chunked = EngineConfig(block_size=4, num_blocks=256, max_num_seqs=8, max_batch_tokens=11)
    assert_same(serve(model, PROMPTS, sampled(), chunked), alone)
    crowded = Engine(
        model,
        EngineConfig(block_size=4, num_blocks=32, max_num_seqs=8, max_batch_tokens=40),
        start=False,
    )
    assert_same(serve(model, PROMPTS, sampled(), engine=crowded), alone)
    assert crowded.stats().num_preemptions > 0
    warm = Engine(model, ROOMY, start=False)
    serve(model, PROMPTS, sampled(), engine=warm)
    again = serve(model, PROMPTS, sampled(), engine=warm)
    assert_same(again, alone)
    assert sum(result.ending.num_cached_tokens for result in again) == 200  # full blocks before each last token


@pytest.mark.parametrize("drafting", ["twin", "stranger", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_gives_the_targets_tokens(
    llama: DecoderModel, other_llama: DecoderModel, drafting: str, temperature: float
) -> None:
    sampling = sampled(temperature=temperature, seed=7)
    if drafting == "ngram":
        drafter: Any = NGramDrafter(longest=2, shortest=1)
    else:
        draft = llama if drafting == "twin" else other_llama
        drafter = ModelDrafter(draft, KVCache(draft.config, 128, 8), vocab_size=llama.config.vocab_size)
    speculator = Speculator(drafter, max_draft_tokens=4, adaptive=False)
    results = serve(llama, PROMPTS, sampling, speculator=speculator)
    assert_same(results, serve(llama, PROMPTS, sampling))
    assert speculator.num_drafted > 0
    if drafting == "twin":
        assert speculator.num_accepted / speculator.num_drafted > 0.95


def test_scores_of_an_answer_do_not_depend_on_chunks_or_the_cache(llama: DecoderModel) -> None:
    prompt, answer = PROMPTS[-1], PROMPTS[-2]
    scores = []
    for budget in (256, 17):
        config = EngineConfig(block_size=8, num_blocks=64, max_num_seqs=4, max_batch_tokens=budget)
        engine = Engine(llama, config, start=False)
        for _ in range(2):
            sink = QueueSink()
            request = Request("s", (*prompt, *answer), SamplingParams(max_tokens=0), score_from=len(prompt))
            engine.submit(request, sink)
            while engine.has_work():
                engine.step()
            scores.append([x.logprob for x in collect(sink, 1.0).ending.prompt_logprobs])
    assert all(len(each) == len(answer) for each in scores)
    for each in scores[1:]:
        assert each == pytest.approx(scores[0], abs=1e-4)


def test_pooled_states_are_the_mean_of_transformers_last_hidden_states(pair: tuple[Any, DecoderModel]) -> None:
    reference, model = pair
    with torch.no_grad():
        expected = reference.model(torch.tensor([PROMPTS[5]])).last_hidden_state[0].mean(0).tolist()
    config = EngineConfig(block_size=8, num_blocks=64, max_num_seqs=4, max_batch_tokens=16)
    engine = Engine(model, config, start=False)
    sink = QueueSink()
    engine.submit(Request("p", tuple(PROMPTS[5]), SamplingParams(max_tokens=3), pooled=True), sink)
    while engine.has_work():
        engine.step()
    assert collect(sink, 1.0).ending.pooled == pytest.approx(expected, abs=1e-4)
