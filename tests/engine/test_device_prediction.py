"""Predicted answers on the runner of a GPU, through its kernels' references: the same answers as without."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.drafter import NGramDrafter
from engine.engine import Engine, Result, collect
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Prediction, Request, SamplingParams
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.test_prediction import spoil


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    return load_model(save_reference(make_reference("Qwen3", seed=3, **sizes), tmp_path_factory.mktemp("target")))


def serve(model: DecoderModel, requests: list[Request], *, drafts: bool = False, tight: bool = False) -> list[Result]:
    config = EngineConfig(
        block_size=4,
        num_blocks=40 if tight else 160,
        max_num_seqs=5,
        max_batch_tokens=48,
        runner="device",
        asynchronous=True,
    )
    speculator = Speculator(NGramDrafter(longest=2, shortest=1), max_draft_tokens=3, adaptive=False) if drafts else None
    engine = Engine(model, config, start=False, speculator=speculator)
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return [collect(sink, 1.0) for sink in sinks]


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_with_any_prediction(model: DecoderModel, seed: int) -> None:
    rng = random.Random(seed)
    requests = []
    for place in range(8):
        # Seeded draws: a random model's greedy ones may part at ties, where passes sum in different orders.
        sampling = SamplingParams(temperature=0.8, seed=place, max_tokens=30, ignore_eos=True)
        requests.append(Request(str(place), tuple(rng.randint(3, 60) for _ in range(rng.randint(1, 20))), sampling))
    plain = serve(model, requests)
    predicted = []
    for request, result in zip(requests, plain, strict=True):
        answer = list(result.token_ids)
        wrong = tuple(rng.randint(3, 60) for _ in range(20))
        ids = rng.choice([tuple(answer), tuple(answer[:9]), tuple(token % 61 for token in spoil(answer, rng)), wrong])
        predicted.append(replace(request, prediction=Prediction(ids)))
    for drafts, tight in ((False, False), (True, False), (False, True)):
        found = serve(model, predicted, drafts=drafts, tight=tight)
        assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    accepted = sum(each.ending.num_accepted_predicted_tokens for each in found)
    assert accepted > 20
