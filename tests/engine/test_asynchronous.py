"""An engine that launches a step before it has the last one's results says what one says that waits: bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.drafter import ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import NonFiniteLogits, StepFailed
from engine.kv_cache import KVCache
from engine.request import FinishReason, Priority, Request, RequestEnding, SamplingParams, ThinkingBudget, TokenChunk
from engine.runner import Flight, StepResult
from engine.scheduler import StepPlan
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.toy import ToyModel

ROOMY = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
prompts = st.lists(st.integers(1, 22), min_size=1, max_size=30)


class Nth:
    """A stop check that ends after ``n`` tokens."""

    def __init__(self, n: int) -> None:
        self.left = n

    def push(self, token_id: int) -> bool:
        self.left -= 1
        return not self.left


def ahead(model: ToyModel, speculator: Speculator | None = None, **sizes: int) -> Engine:
    config = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_batch_tokens": 16} | sizes
    return Engine(
        model,
        EngineConfig(asynchronous=True, **config),  # type: ignore[arg-type]
        start=False,
        speculator=speculator,
    )


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    assert not engine.scheduler.flying


def serve(engine: Engine, requests: list[Request]) -> list[Result]:
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    drain(engine)
    return [collect(sink, 1.0) for sink in sinks]


def alone(model: ToyModel, request: Request) -> Result:
    return serve(Engine(model, ROOMY, start=False), [request])[0]


KINDS = ("greedy", "seeded", "penalised", "scored", "pooled", "echoed", "thinking", "stopped", "held")


def build(index: int, prompt: list[int], kind: str, priority: Priority = Priority.LIVE) -> Request:
    shared = {"max_tokens": 10, "ignore_eos": index % 2 == 0}
    greedy = SamplingParams(temperature=0.0, **shared)  # type: ignore[arg-type]
    sampling = {
        "seeded": SamplingParams(temperature=0.9, seed=index, top_p=0.9, logprobs=1, **shared),  # type: ignore[arg-type]
        "penalised": SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.2, **shared),  # type: ignore[arg-type]
        "scored": SamplingParams(max_tokens=0, prompt_logprobs=1),
        "echoed": SamplingParams(temperature=0.0, prompt_logprobs=0, **shared),  # type: ignore[arg-type]
        "held": SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(3, 4, 5, 6), max_tokens=10),
    }.get(kind, greedy)
    return Request(
        str(index),
        tuple(prompt),
        sampling,
        priority=priority,
        score_from=1 if kind in ("scored", "echoed") and len(prompt) > 1 else None,
        pooled=kind == "pooled",
        thinking=ThinkingBudget(close_id=7, close_ids=(7, 9), max_tokens=3 + index % 3) if kind == "thinking" else None,
        stop_check=Nth(4) if kind == "stopped" else None,
    )


arrivals = st.lists(
    st.tuples(prompts, st.sampled_from(KINDS), st.integers(0, 4), st.sampled_from(Priority)), min_size=1, max_size=8
)


@pytest.mark.slow
@given(
    arrivals=arrivals,
    drafting=st.sampled_from([None, None, "ngram", "model", "adaptive"]),
    cancelled=st.sets(st.integers(0, 7), max_size=2),
    num_blocks=st.sampled_from([14, 21, 64]),
    seed=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_any_mixture_serves_each_as_a_waiting_engine_does_alone(
    arrivals: list[tuple[list[int], str, int, Priority]],
    drafting: str | None,
    cancelled: set[int],
    num_blocks: int,
    seed: int,
) -> None:
    model = ToyModel(seed)
    draft = ToyModel(seed, blur=1.5)
    speculator = None
    if drafting == "ngram":
        speculator = Speculator(NGramDrafter(longest=2, shortest=1), max_draft_tokens=3, adaptive=False)
    elif drafting is not None:
        drafter = ModelDrafter(draft, KVCache(draft.config, 24, 4), vocab_size=23, max_batch_tokens=8)
        speculator = Speculator(drafter, max_draft_tokens=3, adaptive=drafting == "adaptive")
    engine = ahead(model, speculator, num_blocks=num_blocks, max_num_seqs=3, max_batch_tokens=9)
    sinks = [QueueSink() for _ in arrivals]
    for index, (prompt, kind, pause, priority) in enumerate(arrivals):
        for _ in range(pause):
            engine.step()
        handle = engine.submit(build(index, prompt, kind, priority), sinks[index])
        if index in cancelled:
            engine.step()
            engine.step()
            engine.cancel(handle)
            engine.step()
            assert not handle.block_table, "blocks outlived the step after a cancellation"
    drain(engine)
    assert engine.stats().num_failed_steps == 0
    for index, (sink, (prompt, kind, _, priority)) in enumerate(zip(sinks, arrivals, strict=True)):
        result = collect(sink, 1.0)
        expected = alone(model, build(index, prompt, kind, priority))
        assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        if result.ending.reason is not FinishReason.CANCELLED:
            assert result.token_ids == expected.token_ids
            assert result.logprobs == expected.logprobs
            assert result.ending.prompt_logprobs == expected.ending.prompt_logprobs
            assert result.ending.pooled == expected.ending.pooled
            assert result.ending.reason == expected.ending.reason
            assert result.ending.num_output_tokens == expected.ending.num_output_tokens


def test_a_step_is_launched_before_the_last_one_is_collected() -> None:
    engine = ahead(ToyModel(3))
    order: list[str] = []
    launch, collect_step = engine.core.runner.launch, engine.core.runner.collect

    def noting_launch(plan: StepPlan) -> Flight:
        order.append("launch")
        return launch(plan)

    def noting_collect(flight: Flight) -> list[StepResult]:
        order.append("collect")
        return collect_step(flight)

    engine.core.runner.launch = noting_launch  # type: ignore[method-assign]
    engine.core.runner.collect = noting_collect  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    serve(engine, [Request("r", (1, 2, 3), sampling)])
    # The length is known beforehand, so nothing is launched in vain.
    assert order == ["launch", "launch", "collect", "launch", "collect", "launch", "collect", "collect"]


def test_a_stop_costs_one_step_whose_token_is_never_shown() -> None:
    model = ToyModel(3)
    free = model.greedy([5, 6], 12, eos=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(free[7],))
    length = free.index(free[7]) + 1
    model.num_tokens = 0
    result = serve(ahead(model), [Request("r", (5, 6), sampling)])[0]
    assert list(result.token_ids) == free[:length]
    assert result.ending.reason is FinishReason.STOP
    assert model.num_tokens == 2 + (length - 1) + 1


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    model = ToyModel()
    engine = ahead(model)
    prompt = list(range(1, 14))
    first, second = QueueSink(), QueueSink()
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.submit(Request("a", tuple(prompt), SamplingParams(max_tokens=0)), first)
    engine.step()  # in flight now
    engine.submit(Request("b", tuple(prompt), sampling), second)
    drain(engine)
    assert not collect(first, 1).token_ids
    assert list(collect(second, 1).token_ids) == model.greedy(prompt, 12, eos=False)
    # The second reads 12 of its 13 prompt tokens from the cache, and runs all of its answer but the last token.
    assert model.num_tokens == 13 + (1 + 11)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_cancelling_at_any_step_frees_everything(data: st.DataObject) -> None:
    engine = ahead(ToyModel(1), num_blocks=20, max_num_seqs=3, max_batch_tokens=7)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    sinks = [QueueSink() for _ in range(5)]
    handles = [engine.submit(Request("r", tuple([i + 1] * (3 * i + 1)), sampling), s) for i, s in enumerate(sinks)]
    cancelled = data.draw(st.lists(st.sampled_from(range(5)), unique=True, min_size=1))
    for index in cancelled:
        for _ in range(data.draw(st.integers(0, 12))):
            engine.step()
        engine.cancel(handles[index])
        engine.step()
        assert not handles[index].block_table
        engine.scheduler.check_integrity()
    drain(engine)
    for index, sink in enumerate(sinks):
        events = []
        while not events or not isinstance(events[-1], RequestEnding):
            events.append(sink.get(1.0))
        ending = events[-1]
        assert ending.reason in {FinishReason.LENGTH} | ({FinishReason.CANCELLED} if index in cancelled else set())
        assert sum(isinstance(event, RequestEnding) for event in events) == 1
        tokens = [token for event in events if isinstance(event, TokenChunk) for token in event.token_ids]
        assert tokens == ToyModel(1).greedy([index + 1] * (3 * index + 1), 20, eos=False)[: len(tokens)]


def test_nan_fails_its_own_request_only() -> None:
    good = [p for p in ([i, i + 1, 3] for i in range(1, 20)) if 22 not in ToyModel(0).greedy(p, 12)][:3]
    engine = ahead(ToyModel(0, nan_on=22))
    sinks = [QueueSink() for _ in range(3)]
    for sink, prompt in zip(sinks, (good[0], [4, 22, 5], good[1]), strict=True):
        engine.submit(Request("r", tuple(prompt), GREEDY), sink)
    drain(engine)
    for sink, prompt in ((sinks[0], good[0]), (sinks[2], good[1])):
        assert list(collect(sink, 1).token_ids) == ToyModel(0).greedy(prompt, 12)
    with pytest.raises(NonFiniteLogits):
        collect(sinks[1], 1)
    assert list(serve(engine, [Request("r", tuple(good[2]), GREEDY)])[0].token_ids) == ToyModel(0).greedy(good[2], 12)


@pytest.mark.parametrize("half", ["launch", "collect"])
def test_a_step_that_fails_in_either_half_ends_those_in_it_and_the_rest_is_served(
    half: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = ToyModel()
    engine = ahead(model, max_num_seqs=1)
    broken = getattr(engine.core.runner, half)
    calls = 0

    def fail_once(argument: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is on fire")
        return broken(argument)

    monkeypatch.setattr(engine.core.runner, half, fail_once)
    sinks = [QueueSink() for _ in range(2)]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for index, sink in enumerate(sinks):
        engine.submit(Request("r", (index + 1, 2, 3), sampling), sink)
    drain(engine)
    with pytest.raises(StepFailed, match="on fire"):
        collect(sinks[0], 1)
    assert list(collect(sinks[1], 1).token_ids) == model.greedy([2, 2, 3], 12, eos=False)
    assert engine.stats().num_failed_steps == 1


def test_closing_ends_a_step_in_flight() -> None:
    engine = ahead(ToyModel())
    sink = QueueSink()
    engine.submit(Request("r", (1, 2, 3), GREEDY), sink)
    engine.step()
    assert engine.has_work()
    engine.close()
    with pytest.raises(Exception, match="closed"):
        collect(sink, 1)
    assert engine.scheduler.pool.num_owned == 0


@pytest.mark.parametrize("is_typical", [True, False])
def test_costs_are_the_devices_own_times_of_typical_steps(is_typical: bool) -> None:
    """A device's measure does not include drafting; steps that compiled or captured something teach nothing."""
    drafter = ModelDrafter(ToyModel(1), KVCache(ToyModel(1).config, 24, 4), vocab_size=23)
    speculator = Speculator(drafter, max_draft_tokens=3, adaptive=False)
    engine = ahead(ToyModel(1), speculator)
    launch = engine.core.runner.launch

    def timed(plan: StepPlan) -> Flight:
        flight = launch(plan)
        flight.device_s, flight.is_typical = 2.0, is_typical
        return flight

    engine.core.runner.launch = timed  # type: ignore[method-assign]
    result = serve(engine, [Request("r", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))])[
        0
    ]
    assert result.ending.num_draft_tokens > 0
    assert speculator.target_costs.estimate(4) == (pytest.approx(2.0) if is_typical else None)
    assert result.ending.compute_s > 2.0
