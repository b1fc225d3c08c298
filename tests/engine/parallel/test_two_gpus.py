"""A model cut over two GPUs answers as on one, its steps captured on both."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine, collect
from engine.errors import RankLost, StepFailed
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.parallel.model import ParallelModel
from engine.parallel.rank_launcher import load_parallel
from engine.parallel.runner import ParallelRunner
from engine.request import Request, SamplingParams
from engine.runner import StepModel
from engine.sink import QueueSink
from tests.engine.answers import answer_of
from tests.engine.parallel.checkpoints import PROMPTS, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CONFIG = EngineConfig(num_blocks=64, max_num_seqs=8, max_batch_tokens=64)
DEVICES = ("cuda:0", "cuda:1")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)


def serve(engine: Engine, sampling: SamplingParams, salt: str = "") -> list[tuple[int, ...]]:
    """By an engine without a thread of its own, so that what is in a step is no matter of time."""
    sinks = [QueueSink() for _ in PROMPTS]
    requests = [Request(f"r{i}", tuple(prompt), sampling, cache_salt=salt) for i, prompt in enumerate(PROMPTS)]
    engine.submit_all(list(zip(requests, sinks, strict=True)))
    while engine.has_work():
        engine.step()
    return [collect(sink, 1.0).token_ids for sink in sinks]


def serve_once(model: StepModel, sampling: SamplingParams) -> list[tuple[int, ...]]:
    engine = Engine(model, CONFIG, start=False)
    try:
        return serve(engine, sampling)
    finally:
        engine.close()


def worst_gap(model: DecoderModel, prompt: list[int], answer: tuple[int, ...]) -> float:
    """How far below the likeliest token an answer's tokens lie, at most, when one GPU computes all in one go."""
    tokens = [*prompt, *answer]
    blocks = -(-len(tokens) // 16)
    batch = Batch.build([tokens], [len(tokens)], [list(range(blocks))], block_size=16, all_logits=True, device="cuda:0")
    kv = KVCache(model.config, blocks, 16, dtype=model.dtype, device="cuda:0")
    logits = model.logits(model.forward(batch, kv))[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer, device="cuda:0")[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


@pytest.fixture(scope="module", params=["Qwen3", "awq"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cut(folder: Path) -> Iterator[ParallelModel]:
    """In bfloat16, which the kernels compute and graphs capture."""
    model = load_parallel(folder, DEVICES, dtype="bfloat16")
    assert model.prefers_fused
    yield model
    model.close()


def test_in_float32_tokens_are_those_of_one_gpu(folder: Path) -> None:
    cut = load_parallel(folder, DEVICES, dtype="float32")
    try:
        assert serve_once(cut, GREEDY) == serve_once(load_model(folder, device="cuda:0", dtype="float32"), GREEDY)
    finally:
        cut.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_captured_or_not_the_same_is_drawn(
    cut: ParallelModel, folder: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a capture that fails on one rank is done without on all."""

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    answers = {}
    for is_captured in (True, False):
        if not is_captured:
            monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", no_memory)
        engine = Engine(cut, CONFIG, start=False)
        for turn in range(3):  # the third time every graph is there
            answers[is_captured, turn] = serve(engine, sampling, salt=str(turn))
        assert isinstance(engine.core.runner, ParallelRunner)
        assert (engine.core.runner.graphs.num_replays > 0) == is_captured
        engine.close()
    assert len(set(map(tuple, answers.values()))) == 1, answers
    if sampling is GREEDY:
        whole = load_model(folder, device="cuda:0", dtype="bfloat16")
        for prompt, answer in zip(PROMPTS, answers[True, 2], strict=True):
            assert worst_gap(whole, prompt, answer) <= 0.25


def test_a_rank_that_dies_within_a_captured_step_is_an_error_not_a_wait(tmp_path: Path) -> None:
    cut = load_parallel(write_checkpoint("Llama", tmp_path), DEVICES, dtype="bfloat16")
    engine = Engine(cut, CONFIG)
    try:
        sink = QueueSink()
        engine.submit(Request("long", (1, 2, 3), SamplingParams(max_tokens=240, ignore_eos=True)), sink)
        while engine.core.num_output_tokens < 20:
            time.sleep(0.001)
        assert isinstance(engine.core.runner, ParallelRunner)
        assert engine.core.runner.graphs.num_replays > 0
        os.kill(cut._workers[0].pid or 0, signal.SIGKILL)
        with pytest.raises(StepFailed) as failed:
            collect(sink, 60.0)
        assert isinstance(failed.value.__cause__, RankLost)
        request = Request("after", (1, 2, 3), SamplingParams(max_tokens=4))
        with pytest.raises(StepFailed, match="load it again"):
            answer_of(engine, request, timeout_s=60)
    finally:
        engine.close()
        cut.close()
    assert serve_once(load_model(tmp_path, device="cuda:0", dtype="bfloat16"), GREEDY), "the GPU itself is well"
