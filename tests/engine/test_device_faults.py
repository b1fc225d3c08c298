"""A device that is lost takes every engine on it along, with a named error; memory that runs out takes one request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine import device_faults
from engine.config import EngineConfig
from engine.engine import Engine, collect
from engine.errors import DeviceLost, StepFailed
from engine.request import Request, SamplingParams
from engine.runner import Flight
from engine.scheduler import StepPlan
from engine.sink import QueueSink
from tests.engine.toy import ToyModel

CONFIG = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=32)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    device_faults._lost.clear()


def make(asynchronous: bool) -> Engine:
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=32, asynchronous=asynchronous)
    return Engine(ToyModel(), config, start=False)


def request(*prompt: int) -> Request:
    return Request("r", prompt, SAMPLING)


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0


@pytest.mark.parametrize("half", ["launch", "collect"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lost_device_is_lost_for_all_its_engines(
    half: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    first, second = make(asynchronous), make(asynchronous)
    sinks = [QueueSink(), QueueSink()]
    first.submit(request(1, 2, 3), sinks[0])
    second.submit(request(1, 2, 4), sinks[1])
    monkeypatch.setattr(device_faults, "probe", lambda device: "CUDA error: an illegal memory access was encountered")
    for engine in (first, second):
        monkeypatch.setattr(engine.core.runner, half, fault)
        monkeypatch.setattr(engine.core.runner, "close", lambda: fault(None))
        drain(engine)
    for sink in sinks:
        with pytest.raises(DeviceLost, match=r"illegal memory access.*Restart the server"):
            collect(sink, 1.0)
    for engine in (first, second, make(asynchronous)):
        with pytest.raises(DeviceLost):
            engine.submit(request(5), QueueSink())
        engine.close()
    assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 1


def test_a_failed_step_on_a_sound_device_is_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(ToyModel(fail_on=22), CONFIG, start=False)
    sink = QueueSink()
    engine.submit(request(4, 22, 5), sink)
    drain(engine)
    with pytest.raises(StepFailed):
        collect(sink, 1.0)
    engine.submit(request(1, 2), QueueSink())
    drain(engine)


class Cramped:
    """Runs out of memory in steps of more than ``most`` tokens."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.launch_any = engine.core.runner.launch
        self.most = most
        engine.core.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> Flight:
        assert plan.num_tokens == sum(item.num_tokens + item.num_drafts for item in plan.items)
        if plan.num_tokens > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.launch_any(plan)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_memory_that_runs_out_makes_the_largest_wait_and_all_are_served(asynchronous: bool) -> None:
    engine = make(asynchronous)
    Cramped(engine, most=20)
    prompts = [(1, 2, 3), tuple(range(1, 13)), tuple(range(2, 18)), (7, 8)]
    sinks = [QueueSink() for _ in prompts]
    for prompt, sink in zip(prompts, sinks, strict=True):
        engine.submit(request(*prompt), sink)
    drain(engine)
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert list(collect(sink, 1.0).token_ids) == ToyModel().greedy(list(prompt), 8, eos=False)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_failed_steps == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_does_not_fit_alone_fails_alone(asynchronous: bool) -> None:
    engine = make(asynchronous)
    Cramped(engine, most=10)
    sinks = [QueueSink(), QueueSink()]
    engine.submit(request(1, 2, 3), sinks[0])
    engine.submit(request(*range(1, 13)), sinks[1])
    drain(engine)
    assert list(collect(sinks[0], 1.0).token_ids) == ToyModel().greedy([1, 2, 3], 8, eos=False)
    with pytest.raises(StepFailed, match="out of memory"):
        collect(sinks[1], 1.0)
