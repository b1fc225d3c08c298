"""Warming up: before the first request, and when there is nothing to do; in the end it is as if nothing had run."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator

import pytest
import torch

from engine.arena import Arena
from engine.config import EngineConfig
from engine.device.device_share import DeviceShare
from engine.device.draw_kinds import DrawKind
from engine.device.runner import DeviceRunner
from engine.device.step_buffers import StepShape
from engine.device.warm_up import larger_sizes, padded_decodes, warm_up
from engine.engine import Engine, Result, collect
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.runner import Flight
from engine.scheduler import StepPlan
from engine.sink import QueueSink
from engine.slabs import SharedPool
from engine.step_loop import StepLoop
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.no_memory import NoMemory

# Decodes of 40 and 48 sequences are left for quiet moments, twice each, greedy and at a temperature. So many sequences
# would find no blocks.
SIZES = EngineConfig(block_size=4, num_blocks=12, max_num_seqs=48, max_batch_tokens=64, runner="device")
NUM_RUNS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    small = make_reference("Qwen3", vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2)
    return load_model(save_reference(small, tmp_path_factory.mktemp("model")))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["own memory", "shared memory"])
def engine(request: pytest.FixtureRequest, model: DecoderModel, clock: Clock) -> Iterator[Engine]:
    """Stepped by hand; has answered, so that something is cached and something known of costs."""
    arena = Arena(12 << 20, "cpu", slab_bytes=1 << 20) if request.param == "shared memory" else None
    made = Engine(model, SIZES, start=False, arena=arena, clock=clock)
    serve(made, GREEDY, SAMPLED)
    yield made
    made.close()


def serve(engine: Engine, *samplings: SamplingParams) -> list[Result]:
    sinks = [QueueSink() for _ in samplings]
    for index, (sampling, sink) in enumerate(zip(samplings, sinks, strict=True)):
        engine.submit(Request(str(index), (5, 6, 7, 8, 9 + index, 11), sampling), sink)
    while engine.has_work():
        engine.step()
    return [collect(sink, 1.0) for sink in sinks]


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine.core.runner, DeviceRunner)
    return engine.core.runner


def books(engine: Engine) -> dict[str, object]:
    """Whatever tells that something ran: counts, costs, blocks, what is cached, and every byte of the KV pool."""
    core, pool = engine.core, engine.core.pool
    kept = {
        "stats": engine.stats(),
        "costs": core._chunk_costs.__dict__,
        "seconds": (core.step_s.value, core.service_s.value, core.last_device_s, core.last_step_s),
        "blocks": (pool._free, pool._cached, pool._refs, pool._hash_of),
        "slabs": (pool._held, list(pool._idle)) if isinstance(pool, SharedPool) else None,
        "keys and values": [hash(layer.numpy().tobytes()) for layer in core.runner.kv.layers],
        "submitted": engine._num_submitted,
    }
    return copy.deepcopy(kept)


def test_warming_up_runs_every_captured_shape_and_leaves_nothing(model: DecoderModel) -> None:
    sizes = EngineConfig(block_size=16, num_blocks=40, max_num_seqs=5, max_batch_tokens=96, runner="device")
    engine = Engine(model, sizes, name="warm")
    try:
        warm_up(engine, timeout_s=60.0)
        decodes = {StepShape(size, size, size) for size in (1, 2, 4)}
        prompts = {StepShape(size, 8, 8) for size in (16, 32, 64, 96)}
        assert decodes | prompts <= set(runner_of(engine)._views)
        assert engine.stats().num_failed_steps == 0
        sink = QueueSink()
        engine.submit(Request("r", (5, 6, 7, 8, 9, 11), GREEDY), sink)
        assert collect(sink, 60.0).token_ids == expected(model, GREEDY)[0]
        # Up to five sequences are padded to eight.
        assert wait_for(lambda: StepShape(8, 8, 8) in runner_of(engine)._views)
    finally:
        engine.close()
    assert engine.scheduler.pool.num_owned == 0


def expected(model: DecoderModel, *samplings: SamplingParams) -> list[tuple[int, ...]]:
    plain = Engine(model, EngineConfig(block_size=4, num_blocks=64, runner="plain"), start=False)
    return [result.token_ids for result in serve(plain, *samplings)]


def wait_for(is_so: object, seconds: float = 30.0) -> bool:
    assert callable(is_so)
    until_s = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.01)
    return bool(is_so())


def test_quiet_moments_warm_larger_decodes_and_leave_nothing(engine: Engine, clock: Clock) -> None:
    """Checks of two drafts too."""
    runner = runner_of(engine)
    runs = runner.graphs.num_runs
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32), query_lengths=(1, 3)))
    clock.now_s += 60.0
    engine.core.last_step_s = clock.now_s  # a step has just ended
    before = books(engine)
    waited = []
    while (rest_s := engine.idle()) is not None:
        waited.append(rest_s)
        clock.now_s += max(rest_s, 0.01)
        before["stats"] = dataclasses.replace(before["stats"], last_step_s=engine.stats().last_step_s)  # type: ignore[type-var]
        assert books(engine) == before
    assert {StepShape(size, 40 if size % 40 == 0 else 48, size) for size in (40, 48, 120, 144)} <= set(runner._views)
    assert runner.graphs.num_runs == runs + 2 * NUM_RUNS
    # It was quiet for a while, then came the runs, then there was found to be no other.
    assert waited == [pytest.approx(0.2)] + [0.0] * (2 * NUM_RUNS + 1)
    engine.scheduler.check_integrity()
    assert [result.token_ids for result in serve(engine, GREEDY, SAMPLED)] == expected(engine.model, GREEDY, SAMPLED)  # type: ignore[arg-type]


def test_a_request_waits_for_one_run_at_most(model: DecoderModel) -> None:
    """Each of the first runs has a request come while it goes on; the next steps are that request's."""
    engine = Engine(model, SIZES)
    runner, sinks, order = runner_of(engine), [QueueSink() for _ in range(3)], list[str]()
    pad, launch = runner.launch_padding, runner.launch

    def noting_padding(size: int, draws: DrawKind, query_len: int = 1) -> Flight:
        order.append("padding")
        count = order.count("padding")
        if count <= len(sinks):
            engine.submit(Request(str(count), (5, 6, 7, 8, 9, 11), GREEDY), sinks[count - 1])
        return pad(size, draws, query_len)

    def noting_launch(plan: StepPlan) -> Flight:
        order.append("step")
        return launch(plan)

    runner.launch_padding, runner.launch = noting_padding, noting_launch  # type: ignore[method-assign]
    try:
        engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
        assert [collect(sink, 60.0).token_ids for sink in sinks] == expected(model, GREEDY) * 3
        assert wait_for(lambda: order.count("padding") == NUM_RUNS)
    finally:
        engine.close()
    steps = order.index("padding", 1) - 1
    assert steps >= GREEDY.max_tokens  # type: ignore[operator]
    assert order == (["padding"] + ["step"] * steps) * 3 + ["padding"] * (NUM_RUNS - 3)


def test_a_run_after_an_idle_night_is_no_stall_of_a_night(model: DecoderModel, clock: Clock) -> None:
    engine = Engine(model, SIZES, start=False, clock=clock)
    runner, stalled_s = runner_of(engine), list[float]()
    pad = runner.launch_padding

    def slow_padding(size: int, draws: DrawKind, query_len: int = 1) -> Flight:
        clock.now_s += 2.0
        engine.submit(Request("r", (5, 6), GREEDY), QueueSink())
        stalled_s.append(engine.stats().stalled_s)
        return pad(size, draws, query_len)

    runner.launch_padding = slow_padding  # type: ignore[method-assign]
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    clock.now_s += 36_000.0
    assert engine.idle() == 0.0
    assert stalled_s == [pytest.approx(2.0)]
    engine.close()


def test_nothing_is_warmed_beside_work_or_before_a_heavier_engines(model: DecoderModel, clock: Clock) -> None:
    share = DeviceShare()
    heavy = share.join(weight_bytes=1 << 60, pace_s=1.0, wake=lambda: None)
    engine = Engine(model, dataclasses.replace(SIZES, itl_target_s=1.0), start=False, share=share, clock=clock)
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    runs = runner_of(engine).graphs.num_runs
    sink = QueueSink()
    engine.submit(Request("r", (5, 6), GREEDY), sink)
    clock.now_s += 60.0
    assert engine.idle() == 0.0
    assert runner_of(engine).graphs.num_runs == runs
    while engine.has_work():
        engine.step()
    clock.now_s += 60.0
    heavy.press(True)
    assert engine.idle() == 0.0  # once a pace is fair
    began_s = clock.now_s
    assert not heavy.was_alone(began_s - 1.0)
    clock.now_s += 0.01
    assert engine.idle() == pytest.approx(0.74)
    assert heavy.was_alone(clock.now_s)
    engine.close()


def test_a_failed_capture_ends_it(engine: Engine, clock: Clock) -> None:
    runner = runner_of(engine)
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    clock.now_s += 60.0
    assert engine.idle() == 0.0
    runs, runner.graphs.has_failed = runner.graphs.num_runs, True
    clock.now_s += 60.0
    assert [engine.idle(), engine.idle()] == [0.0, None]
    assert runner.graphs.num_runs == runs


def test_no_memory_for_a_run_is_said_once_and_harms_nobody(
    engine: Engine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    clock.now_s += 60.0
    with NoMemory(torch.Tensor.index_select):
        assert engine.idle() == 0.0
    clock.now_s += 60.0
    assert engine.idle() is None
    assert caplog.text.count("is left undone (OutOfMemoryError: out of memory (simulated))") == 1
    assert [result.token_ids for result in serve(engine, GREEDY, SAMPLED)] == expected(engine.model, GREEDY, SAMPLED)  # type: ignore[arg-type]


def test_a_closed_engine_is_not_warmed(model: DecoderModel, clock: Clock) -> None:
    engine = Engine(model, SIZES, start=False, clock=clock)
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    clock.now_s += 60.0
    assert engine.idle() == 0.0
    engine.close()
    clock.now_s += 60.0
    assert engine.idle() is None
    engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
    assert engine.idle() is None


def test_engines_of_one_thread_are_all_warmed(model: DecoderModel) -> None:
    loop = StepLoop("shared")
    engines = [Engine(model, SIZES, loop=loop, name=str(index)) for index in range(2)]
    try:
        for engine in engines:
            engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 40)))
        assert wait_for(lambda: all(runner_of(engine).graphs.num_runs == NUM_RUNS // 2 for engine in engines))
    finally:
        for engine in engines:
            engine.close()
        loop.close()
