"""Grammars on the device's runner: the answers are the plain runner's, however they are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.device.drafter import DeviceDrafter
from engine.device.mask_buffers import MaskBuffers
from engine.device.runner import DeviceRunner
from engine.drafter import Drafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import StepFailed
from engine.grammar_cursor import GrammarCursor
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.mask_filler import MaskedRows
from engine.models.decoder import DecoderModel
from engine.request import FinishReason, Prediction, Request, SamplingParams
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.grammars import constraint, tokenizer
from tests.engine.test_constrained import PERSON, same, text_of, variants


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[DecoderModel]:
    """A target and a worse model of the same kind, of the tokenizer's vocabulary."""
    sizes = {"vocab_size": tokenizer().vocab_size, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes["max_position_embeddings"] = 512
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    return [
        load_model(save_reference(make_reference("Qwen3", seed=seed, **sizes), folder))
        for seed, folder in enumerate(folders)
    ]


def make(model: DecoderModel, runner: str, drafter: Drafter | None = None, **sizes: Any) -> Engine:
    config = {"block_size": 4, "num_blocks": 400, "max_num_seqs": 6, "max_batch_tokens": 64} | sizes
    return Engine(
        model,
        EngineConfig(runner=runner, asynchronous=runner == "device", **config),  # type: ignore[arg-type]
        start=False,
        eos_token_ids=tokenizer().eos_token_ids,
        speculator=None if drafter is None else Speculator(drafter, max_draft_tokens=3, adaptive=False),
    )


def serve(engine: Engine, requests: Seq[Request]) -> list[Result]:
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    return [collect(sink, 1.0) for sink in sinks]


def drafter(kind: str, models: list[DecoderModel]) -> Drafter:
    if kind == "ngram":
        return NGramDrafter(longest=3, shortest=1)
    model = models[{"twin": 0, "other": 1}[kind]]
    cache = KVCache(model.config, 400, 4)
    return DeviceDrafter(model, cache, vocab_size=tokenizer().vocab_size, max_draft_tokens=3, max_sequences=6)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="crowd"),
        pytest.param({"max_batch_tokens": 9}, id="chunked", marks=pytest.mark.slow),
        pytest.param({"num_blocks": 47}, id="tight", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", [None, "twin", "other", "ngram"])
def test_answers_are_the_plain_runners(models: list[DecoderModel], kind: str | None, sizes: dict[str, int]) -> None:
    plain = serve(make(models[0], "plain"), variants())
    engine = make(models[0], "device", None if kind is None else drafter(kind, models), **sizes)
    same(serve(engine, variants()), plain)


def test_a_prediction_changes_nothing(models: list[DecoderModel]) -> None:
    of, sampling = constraint("json_schema", PERSON), SamplingParams(temperature=0.0, max_tokens=300)
    plain = serve(make(models[0], "plain"), [Request("r", (5, 6), sampling, constraint=of)])
    predicted = Prediction((*plain[0].token_ids[:20], 3, 3, 3))
    asked = Request("r", (5, 6), sampling, constraint=of, prediction=predicted)
    result = serve(make(models[0], "device"), [asked])
    same(result, plain)
    assert result[0].ending.num_accepted_predicted_tokens >= min(20, len(plain[0].token_ids)) - 1


def test_the_device_draws_and_is_not_kept_waiting(models: list[DecoderModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a step are launched before the step before is settled, its draws after; the host draws nothing."""
    monkeypatch.setattr("engine.device.runner.draw_by_host", None)
    engine = make(models[0], "device")
    runner = engine.core.runner
    assert isinstance(runner, DeviceRunner)
    happened: list[str] = []
    for name in ("launch", "draw", "collect"):
        monkeypatch.setattr(runner, name, _noted(happened, name, getattr(runner, name)))
    of, sampling = constraint("regex", "[ab]{30}"), SamplingParams(temperature=0.0, max_tokens=9, logprobs=1)
    plain = serve(make(models[0], "plain"), [Request("r", (5,), sampling, constraint=of)])
    same(serve(engine, [Request("r", (5,), sampling, constraint=of)]), plain)
    assert happened[:8] == ["launch", "draw", "launch", "collect", "draw", "launch", "collect", "draw"]


def _noted(happened: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        happened.append(name)
        return function(*args)

    return noted


def test_a_draw_that_fails_ends_its_step_and_the_rest_goes_on(
    models: list[DecoderModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(models[0], "device")
    sink, sampling = QueueSink(), SamplingParams(temperature=0.0, max_tokens=9)
    engine.submit(Request("r", (5,), sampling, constraint=constraint("regex", "[ab]{30}")), sink)
    with monkeypatch.context() as broken:
        broken.setattr("engine.device.runner.mask_logits", _no_memory)
        while engine.has_work():
            engine.step()
    with pytest.raises(StepFailed):
        collect(sink, 1.0)
    assert engine.scheduler.pool.num_owned == 0
    again = serve(engine, [Request("r", (5,), sampling, constraint=constraint("regex", "[ab]{30}"))])
    assert len(again[0].token_ids) == 9


def _no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("num_threads", [1, 2])
def test_masks_side_by_side_are_the_masks_one_by_one(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.mask_filler.num_threads", lambda: num_threads)
    vocab_size = tokenizer().vocab_size
    buffers = MaskBuffers(8, vocab_size, torch.device("cpu"))
    buffers.logits(8, torch.float32)
    cursors = [GrammarCursor(constraint("regex", f"{'ab' * i}[c-{letter}]")) for i, letter in enumerate("defghi")]
    buffers.fill([MaskedRows(cursor, i) for i, cursor in enumerate(cursors)])
    masks = buffers.masks(8).clone()
    for cursor, mask in zip(cursors, masks, strict=False):
        own = np.zeros((1, cursor.num_words), dtype=np.int32)
        cursor.fill(own)
        assert (mask.numpy() == own[0]).all()
    assert (masks[6:] == -1).all()
    buffers.fill([MaskedRows(cursors[1], 2)])
    assert (buffers.masks(8)[2] == masks[1]).all()
    assert (buffers.masks(8)[[0, 1, 3, 4, 5]] == -1).all()


@pytest.mark.parametrize("kind", [None, "other"])
def test_unseeded_answers_are_valid(models: list[DecoderModel], kind: str | None) -> None:
    of, sampling = constraint("json_schema", PERSON), SamplingParams(temperature=1.2, max_tokens=300)
    requests = [Request("r", (5, index), sampling, constraint=of) for index in range(1, 13)]
    results = serve(make(models[0], "device", None if kind is None else drafter(kind, models)), requests)
    whole = [text_of(result) for result in results if result.ending.reason is FinishReason.STOP]
    assert len(whole) > 6
    for text in whole:
        jsonschema.validate(json.loads(text), PERSON)
