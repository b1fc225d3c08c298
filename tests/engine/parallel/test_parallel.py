"""A model cut over two processes answers as the whole one does; a lost process is named, and nothing hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import LoadError, RankLost, StepFailed, UnsupportedModel
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.load.source import load_config
from engine.parallel.model import ParallelModel
from engine.parallel.rank_launcher import load_parallel
from engine.parallel.rank_orders import batch_header, pack, packed_length, unpack
from engine.parallel.shard import shard_config
from engine.request import Request, SamplingParams
from tests.engine.answers import answer_of
from tests.engine.parallel.checkpoints import PROMPTS, write_checkpoint

DEVICES = ("cpu", "cpu")
CONFIG = EngineConfig(num_blocks=64, asynchronous=False)
# Sums over ranks are sums in another order.
CLOSE = 2e-4


def generate(model: Any, **sampling: Any) -> list[tuple[int, ...]]:
    engine = Engine(model, CONFIG)
    try:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
        requests = [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(PROMPTS)]
        return [answer_of(engine, request, timeout_s=60).token_ids for request in requests]
    finally:
        engine.close()


@pytest.fixture
def whole_and_cut(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, ParallelModel]]:
    folder = write_checkpoint(request.param, tmp_path)
    cut = load_parallel(folder, DEVICES)
    yield load_model(folder, cpu_compute="exact"), cut
    cut.close()


@pytest.mark.slow
@pytest.mark.parametrize("whole_and_cut", ["Llama", "tied", "biased"], indirect=True)
def test_greedy_tokens_and_log_probabilities_are_those_of_the_whole(whole_and_cut: tuple[Any, ParallelModel]) -> None:
    whole, cut = whole_and_cut
    assert cut.weight_bytes < whole.weight_bytes
    assert generate(cut, temperature=0.0) == generate(whole, temperature=0.0)
    engines = [Engine(model, CONFIG) for model in (whole, cut)]
    request = Request("scored", tuple(PROMPTS[1]), SamplingParams(max_tokens=1), score_from=1)
    scores = [answer_of(engine, request, timeout_s=60).ending.prompt_logprobs for engine in engines]
    for engine in engines:
        engine.close()
    assert [s.logprob for s in scores[1]] == pytest.approx([s.logprob for s in scores[0]], abs=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("whole_and_cut", ["awq", "gptq", "Qwen3"], indirect=True)
def test_hidden_states_are_those_of_the_whole(whole_and_cut: tuple[Any, ParallelModel]) -> None:
    """4-bit layers: int8 copies would round each shard by its own scale, so compare against exact ones, loosely."""
    whole, cut = whole_and_cut
    tokens = [PROMPTS[1], PROMPTS[0]]
    lengths = [len(t) for t in tokens]
    tables = [[0, 1, 2], [3]]
    batch = Batch.build(tokens, lengths, tables, block_size=16, all_logits=True)
    outputs = []
    for model in (whole, cut):
        kv = KVCache(model.config, 4, 16, dtype=model.dtype)
        outputs.append(model.logits(model.forward(batch, kv)))
    error = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert error < (CLOSE if whole.config.quant is None else 0.05)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_nothing_hangs(tmp_path: Path) -> None:
    cut = load_parallel(write_checkpoint("Llama", tmp_path), DEVICES)
    engine = Engine(cut, CONFIG)
    try:
        request = Request("before", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True))
        assert answer_of(engine, request, timeout_s=60).token_ids
        os.kill(cut._workers[0].pid or 0, signal.SIGKILL)
        for name in ("during", "after"):
            with pytest.raises(StepFailed) as failed:
                answer_of(engine, replace(request, request_id=name), timeout_s=60)
            assert isinstance(failed.value.__cause__, RankLost)
        assert engine.stats().kv_free_fraction == 1.0
    finally:
        engine.close()
        cut.close()


def test_what_cannot_be_cut_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = write_checkpoint("Llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"num_heads|num_kv_heads"):
        load_parallel(folder, ("cpu",) * 3)
    quantised = replace(load_config(folder), quant=None, intermediate_size=7 * 31)
    with pytest.raises(UnsupportedModel, match="intermediate_size"):
        shard_config(quantised, 2)


@pytest.mark.slow
def test_a_rank_that_cannot_load_is_an_error_not_a_wait(tmp_path: Path) -> None:
    folder = write_checkpoint("Llama", tmp_path)
    tensors = folder / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(LoadError):
        load_parallel(folder, DEVICES)


def test_a_pool_is_known_to_every_rank_until_it_goes(tmp_path: Path) -> None:
    cut = load_parallel(write_checkpoint("Llama", tmp_path), DEVICES)
    try:
        batch = Batch.build([[1, 2]], [2], [[0]], block_size=16)
        first = KVCache(cut.config, 2, 16)
        expected = cut.forward(batch, first)
        first.clear([0])
        assert not first.layers[0].any()
        del first
        again = KVCache(cut.config, 2, 16)
        assert torch.equal(cut.forward(batch, again), expected)
    finally:
        cut.close()


def test_a_batch_survives_the_journey() -> None:
    batch = Batch.build([[1, 2, 3], [4]], [19, 5], [[7, 2], [1]], block_size=16)
    head = batch_header(3, batch).tolist()
    body = pack(batch)
    assert packed_length(head) == body.numel()
    back = unpack(head, body, torch.device("cpu"))
    for name in (
        "token_ids",
        "positions",
        "slot_mapping",
        "query_start",
        "context_lens",
        "block_tables",
        "logits_rows",
    ):
        sent, received = getattr(batch, name), getattr(back, name)
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received), name
    assert back.query_lens == batch.query_lens
    assert back.context_lens_host == batch.context_lens_host
