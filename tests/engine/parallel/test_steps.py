"""Steps of the device's runner, computed along by a second process: through the kernels' references, without graphs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device.step_buffers import StepForm, StepShape
from engine.device.warm_up import warm_up
from engine.drafter import NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import RankLost, StepFailed
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.parallel.model import ParallelModel
from engine.parallel.rank_launcher import load_parallel
from engine.parallel.rank_orders import form_of, step_header
from engine.parallel.rank_watchdog import RankWatchdog
from engine.parallel.runner import ParallelRunner
from engine.request import Request, SamplingParams
from engine.runner import StepModel
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.answers import answer_of
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.parallel.checkpoints import PROMPTS, write_checkpoint

CONFIG = EngineConfig(runner="device", asynchronous=True, block_size=4, num_blocks=128, max_num_seqs=5)
SHARED = {"max_tokens": 20, "ignore_eos": True}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, **SHARED),  # type: ignore[arg-type]
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=7, **SHARED),  # type: ignore[arg-type]
    "penalised": SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=2, **SHARED),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def whole_and_cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DecoderModel, ParallelModel]]:
    folder = write_checkpoint("Llama", tmp_path_factory.mktemp("model"))
    cut = load_parallel(folder, ("cpu", "cpu"))
    yield load_model(folder), cut
    cut.close()


def serve(engine: Engine, requests: list[Request]) -> list[Result]:
    sinks = [QueueSink() for _ in requests]
    engine.submit_all(list(zip(requests, sinks, strict=True)))
    return [collect(sink, 60.0) for sink in sinks]


def serve_once(
    model: StepModel, requests: list[Request], speculator: Speculator | None = None, **changes: int
) -> list[Result]:
    engine = Engine(model, replace(CONFIG, **changes), speculator=speculator)  # type: ignore[arg-type]
    try:
        assert isinstance(engine.core.runner, ParallelRunner) == isinstance(model, ParallelModel)
        return serve(engine, requests)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_steps_of_two_ranks_draw_what_one_draws(whole_and_cut: tuple[DecoderModel, ParallelModel], kind: str) -> None:
    """Prompts in chunks, decodes behind them, each step launched before the one before it was seen."""
    requests = [Request(f"r{i}", tuple(prompt), SAMPLINGS[kind]) for i, prompt in enumerate(PROMPTS)]
    answers = [serve_once(model, requests, max_batch_tokens=16) for model in whole_and_cut]
    assert [result.token_ids for result in answers[0]] == [result.token_ids for result in answers[1]]
    for ours, theirs in zip(*answers, strict=True):
        assert [t.logprob for t in ours.logprobs] == pytest.approx([t.logprob for t in theirs.logprobs], abs=2e-4)


@pytest.mark.slow
def test_four_ranks_draw_what_one_draws(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    folder = save_reference(make_reference(seed=4, **sizes), tmp_path)
    cut = load_parallel(folder, ("cpu",) * 4)
    try:
        requests = [Request(f"r{i}", tuple(prompt), SAMPLINGS["sampled"]) for i, prompt in enumerate(PROMPTS)]
        ours, theirs = (serve_once(model, requests) for model in (cut, load_model(folder)))
        assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    finally:
        cut.close()


def test_drafts_and_prompt_scores_pass_through_the_ranks(whole_and_cut: tuple[DecoderModel, ParallelModel]) -> None:
    known = Request("known", tuple(range(3, 200)), SAMPLINGS["greedy"])  # whatever is drawn was in the prompt
    scored = Request("scored", tuple(PROMPTS[1]), SamplingParams(max_tokens=1), score_from=1)
    answers = []
    for model in whole_and_cut:
        speculator = Speculator(NGramDrafter(longest=2, shortest=1), max_draft_tokens=3, adaptive=False)
        answers.append(serve_once(model, [known, scored], speculator))
        assert speculator.num_drafted > 0
    assert answers[0][0].token_ids == answers[1][0].token_ids
    scores = [[t.logprob for t in answer[1].ending.prompt_logprobs] for answer in answers]
    assert scores[0] == pytest.approx(scores[1], abs=2e-4)


def test_an_engine_over_ranks_warms_nothing_when_it_is_quiet(
    whole_and_cut: tuple[DecoderModel, ParallelModel],
) -> None:
    """A step that a rank has no memory for would be the end of the model."""
    for model, has_chores in zip(whole_and_cut, (True, False), strict=True):
        engine = Engine(model, replace(CONFIG, max_batch_tokens=32))
        given: list[Iterator[object]] = []
        engine.when_quiet = given.append  # type: ignore[method-assign]
        try:
            warm_up(engine, timeout_s=60.0)
            assert len(given) == has_chores
            assert engine.stats().num_failed_steps == 0
        finally:
            engine.close()


def test_engines_that_share_the_ranks_take_turns(whole_and_cut: tuple[DecoderModel, ParallelModel]) -> None:
    whole, cut = whole_and_cut
    requests = [Request(f"r{i}", tuple(prompt), SAMPLINGS["greedy"]) for i, prompt in enumerate(PROMPTS)]
    expected = [result.token_ids for result in serve_once(whole, requests)]
    engines = [Engine(cut, CONFIG, name=str(index)) for index in range(3)]
    answers: dict[int, list[tuple[int, ...]]] = {}

    def run(index: int) -> None:
        answers[index] = [result.token_ids for result in serve(engines[index], requests)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for engine in engines:
        engine.close()
    assert answers == dict.fromkeys(range(3), expected)


def test_a_rank_that_dies_during_a_step_ends_its_requests(tmp_path: Path) -> None:
    cut = load_parallel(write_checkpoint("Llama", tmp_path), ("cpu", "cpu"))
    engine = Engine(cut, CONFIG)
    try:
        long = Request("long", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        sink = QueueSink()
        engine.submit(long, sink)
        while engine.core.num_output_tokens < 5:
            time.sleep(0.001)
        os.kill(cut._workers[0].pid or 0, signal.SIGKILL)
        with pytest.raises(StepFailed) as failed:
            collect(sink, 60.0)
        assert isinstance(failed.value.__cause__, RankLost)
        with pytest.raises(StepFailed, match="load it again"):
            serve(engine, [long])
        assert engine.stats().kv_free_fraction == 1.0
    finally:
        engine.close()
        cut.close()


def test_a_step_that_fails_here_lets_go_of_the_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory (simulated)")

    cut = load_parallel(write_checkpoint("Llama", tmp_path), ("cpu", "cpu"))
    engine = Engine(cut, CONFIG)
    try:
        monkeypatch.setattr(cut.fused, "forward", no_memory)
        with pytest.raises(StepFailed) as failed:
            answer_of(engine, Request("r", (1, 2, 3), SAMPLINGS["greedy"]), timeout_s=60)
        assert isinstance(failed.value.__cause__, RankLost)
        cut._workers[0].join(30)
        assert not cut._workers[0].is_alive()
    finally:
        engine.close()
        cut.close()


def sleep_for_long() -> None:
    time.sleep(600)


@pytest.mark.parametrize("how", ["ends", "stops answering", "is given up"])
def test_the_watch_lets_go_of_a_rank_that(how: str) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=sleep_for_long, daemon=True)
    worker.start()
    reasons: list[str] = []
    heard = threading.Event()
    watch = RankWatchdog([worker], lambda reason: (reasons.append(reason), heard.set())[1])
    try:
        if how == "stops answering":
            with watch.limit(60.0), watch.limit(0.01):
                assert heard.wait(30)
        else:
            assert not heard.wait(0.1)
            if how == "ends":
                worker.kill()
            else:
                watch.alarm("a step failed")
            assert heard.wait(30)
        expected = {"ends": "the process of rank 1", "stops answering": "took longer", "is given up": "a step failed"}
        assert len(reasons) == 1
        assert expected[how] in reasons[0]
    finally:
        worker.kill()
        worker.join()


def test_a_step_is_announced_whole() -> None:
    for form in (StepForm(StepShape(6, 2, 6), 3, by_rows=False), StepForm(StepShape(32, 8, 0), 20, by_rows=True)):
        head = step_header(5, form, 9, torch.zeros((2, 7))).tolist()
        assert form_of(head) == form
        assert head[1] == 5
        assert head[7:] == [9, 2, 7]
