"""The engine as a whole on a model that computes exactly: what is served is what the model says, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafter import ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import (
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    NonFiniteLogits,
    OutOfMemoryPlan,
    RequestTooLong,
    StepFailed,
)
from engine.kv_cache import KVCache
from engine.request import FinishReason, Priority, Request, RequestEnding, SamplingParams, ThinkingBudget, TokenChunk
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.toy import ToyModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SMALL = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=16)


def make(model: ToyModel, config: EngineConfig = SMALL, **options: object) -> Engine:
    return Engine(model, config, start=False, **options)  # type: ignore[arg-type]


def drain(engine: Engine) -> None:
    """Step until nothing is left, then sum the books in full."""
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_owned == 0


def serve(engine: Engine, requests: list[Request]) -> list[Result]:
    sinks = [QueueSink() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
    drain(engine)
    return [collect(sink, 1.0) for sink in sinks]


def request(prompt: list[int], sampling: SamplingParams = GREEDY, name: str = "r", **options: object) -> Request:
    return Request(name, tuple(prompt), sampling, **options)  # type: ignore[arg-type]


prompts = st.lists(st.integers(1, 22), min_size=1, max_size=30)


@given(st.lists(prompts, min_size=1, max_size=7), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_greedy_answers_are_the_models_own_whatever_the_batch(many: list[list[int]], seed: int) -> None:
    model = ToyModel(seed)
    # 20 blocks of 4 cannot hold 4 sequences of 42 tokens, so sequences are also preempted.
    engine = make(model, EngineConfig(block_size=4, num_blocks=20, max_num_seqs=4, max_batch_tokens=7))
    for result, prompt in zip(serve(engine, [request(p) for p in many]), many, strict=True):
        assert list(result.token_ids) == model.greedy(prompt, 12)


@pytest.mark.parametrize("seed", range(4))
def test_preemption_happens_and_changes_nothing(seed: int) -> None:
    model = ToyModel(seed)
    engine = make(model, EngineConfig(block_size=2, num_blocks=24, max_num_seqs=4, max_batch_tokens=9))
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True, logprobs=2)
    many = [request([1 + i, 2, 3, 4], sampling) for i in range(6)]
    alone = [serve(make(model), [each])[0] for each in many]
    crowded = serve(engine, many)
    assert engine.stats().num_preemptions > 0
    assert [r.token_ids for r in crowded] == [r.token_ids for r in alone]
    assert [r.logprobs for r in crowded] == [r.logprobs for r in alone]


def test_a_prefix_hit_changes_nothing_but_the_work() -> None:
    model = ToyModel()
    engine = make(model)
    prompt = list(range(1, 18))
    first = serve(engine, [request(prompt)])[0]
    tokens_before = model.num_tokens
    second = serve(engine, [request(prompt)])[0]
    assert first.token_ids == second.token_ids
    assert (first.ending.num_cached_tokens, second.ending.num_cached_tokens) == (0, 16)
    assert model.num_tokens - tokens_before == 1 + len(second.token_ids) - 1
    assert engine.stats().prefix_hit_rate == pytest.approx(16 / 34)
    other = serve(engine, [request(prompt, cache_salt="someone else")])[0]
    assert other.ending.num_cached_tokens == 0
    assert other.token_ids == first.token_ids


def test_answers_are_cached_for_the_next_turn() -> None:
    model = ToyModel()
    engine = make(model)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    first = serve(engine, [request([1, 2, 3, 4, 5, 6], sampling)])[0]
    again = [1, 2, 3, 4, 5, 6, *first.token_ids, 7]
    # 14 tokens were computed (the last was drawn, not run), so 3 blocks of 4 are full.
    assert serve(engine, [request(again)])[0].ending.num_cached_tokens == 12


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_cancelling_at_any_step_frees_everything(data: st.DataObject) -> None:
    engine = make(ToyModel(1), EngineConfig(block_size=4, num_blocks=20, max_num_seqs=3, max_batch_tokens=7))
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    sinks = [QueueSink() for _ in range(5)]
    handles = [engine.submit(request([i + 1] * (3 * i + 1), sampling), sink) for i, sink in enumerate(sinks)]
    cancelled = data.draw(st.lists(st.sampled_from(range(5)), unique=True, min_size=1))
    for index in cancelled:
        for _ in range(data.draw(st.integers(0, 12))):
            engine.step()
        engine.cancel(handles[index])
        engine.step()
        assert not handles[index].block_table, "blocks outlived the step after a cancellation"
        engine.scheduler.check_integrity()
    drain(engine)
    for index, sink in enumerate(sinks):
        events = []
        while not events or not isinstance(events[-1], RequestEnding):
            events.append(sink.get(1.0))
        expected = {FinishReason.LENGTH} | ({FinishReason.CANCELLED} if index in cancelled else set())
        assert events[-1].reason in expected
        assert sum(isinstance(e, RequestEnding) for e in events) == 1
        assert sum(len(e.token_ids) for e in events[:-1]) == events[-1].num_output_tokens


def test_stop_ids_eos_and_lengths_end_a_request() -> None:
    model = ToyModel(3)
    free = model.greedy([5, 6], 40, eos=False)
    run = lambda **options: serve(  # noqa: E731
        make(model), [request([5, 6], SamplingParams(temperature=0.0, **options))]
    )[0]
    full = run(max_tokens=40, ignore_eos=True)
    assert (list(full.token_ids), full.ending.reason) == (free, FinishReason.LENGTH)
    stop = free[7]
    stopped = run(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    assert (list(stopped.token_ids), stopped.ending.reason) == (free[: free.index(stop) + 1], FinishReason.STOP)
    least = free.index(stop) + 3
    held = run(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,), min_tokens=least)
    assert len(held.token_ids) > least
    assert stop not in held.token_ids[:least]
    to_the_end = run(ignore_eos=True)
    assert len(to_the_end.token_ids) == engine_limit(model) - 2
    assert run(max_tokens=0).ending.reason is FinishReason.LENGTH


def engine_limit(model: ToyModel) -> int:
    return min(model.config.context_length, 64 * 4)


def test_stop_check_ends_after_the_token_it_names() -> None:
    class ThirdToken:
        count = 0

        def push(self, token_id: int) -> bool:
            self.count += 1
            return self.count == 3

    model = ToyModel(3)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    result = serve(make(model), [request([5, 6], sampling, stop_check=ThirdToken())])[0]
    assert list(result.token_ids) == model.greedy([5, 6], 3, eos=False)
    assert result.ending.reason is FinishReason.STOP


def test_thinking_is_closed_when_its_budget_is_spent() -> None:
    model = ToyModel(3)
    free = model.greedy([5, 6], 30, eos=False)
    close = next(t for t in range(1, 23) if t not in free[:12])
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    thinking = ThinkingBudget(close_id=close, close_ids=(close, 9), max_tokens=6)
    result = serve(make(model), [request([5, 6], sampling, thinking=thinking)])[0]
    assert list(result.token_ids[:8]) == [*free[:6], close, 9]
    assert list(result.token_ids[8:]) == model.greedy([5, 6, *free[:6], close, 9], 12, eos=False)
    by_itself = ThinkingBudget(close_id=free[2], close_ids=(free[2],), max_tokens=6)
    result = serve(make(model), [request([5, 6], sampling, thinking=by_itself)])[0]
    assert list(result.token_ids) == free[:20]


def test_scores_are_log_probabilities_of_one_prefill() -> None:
    model = ToyModel(2)
    engine = make(model, EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=5))
    tokens = [random.Random(1).randrange(1, 23) for _ in range(40)]
    logprobs = torch.log_softmax(model.reference(tokens), -1)
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=3)
    for turn in range(2):  # the second time most of the prompt comes from the cache
        ending = serve(engine, [request(tokens, sampling, score_from=21)])[0].ending
        assert len(ending.prompt_logprobs) == 19
        for place, scored in enumerate(ending.prompt_logprobs, start=21):
            row = logprobs[place - 1]
            assert scored.token_id == tokens[place]
            assert scored.logprob == pytest.approx(float(row[tokens[place]]), abs=1e-6)
            assert scored.rank == int((row > row[tokens[place]]).sum())
            assert [lp for _, lp in scored.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-6)
        assert ending.num_cached_tokens == (20 if turn else 0)
        assert ending.num_output_tokens == 0


def test_pooled_state_is_the_mean_over_the_prompt_alone_and_beside_a_generation() -> None:
    model = ToyModel(2)
    tokens = list(range(1, 15))
    ids = torch.tensor(tokens)
    weights = (torch.arange(14) % 5 + 1).float().unsqueeze(1)
    mean = ((model.embedding[ids] * weights).cumsum(0) + model.last[ids]).mean(0).tolist()
    engine = make(model, EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=5))
    alone = serve(engine, [request(tokens, SamplingParams(max_tokens=0), pooled=True)])[0]
    beside = serve(engine, [request(tokens, GREEDY, pooled=True)])[0]
    assert alone.ending.pooled == pytest.approx(mean)
    assert beside.ending.pooled == pytest.approx(mean)
    assert list(beside.token_ids) == model.greedy(tokens, 12)


def test_nan_fails_its_own_request_only_and_poisons_nobody() -> None:
    good = [p for p in ([i, i + 1, 3] for i in range(1, 20)) if 22 not in ToyModel(0).greedy(p, 12)][:3]
    engine = make(ToyModel(0, nan_on=22))
    sinks = [QueueSink() for _ in range(3)]
    for sink, prompt in zip(sinks, (good[0], [4, 22, 5], good[1]), strict=True):
        engine.submit(request(prompt), sink)
    drain(engine)
    assert list(collect(sinks[0], 1).token_ids) == ToyModel(0).greedy(good[0], 12)
    assert list(collect(sinks[2], 1).token_ids) == ToyModel(0).greedy(good[1], 12)
    with pytest.raises(NonFiniteLogits):
        collect(sinks[1], 1)
    assert list(serve(engine, [request(good[2])])[0].token_ids) == ToyModel(0).greedy(good[2], 12)


def test_a_failing_step_fails_those_in_it_and_serves_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    good = [p for p in ([i, i + 1, 3] for i in range(1, 20)) if 22 not in ToyModel(0).greedy(p, 12)][:2]
    model = ToyModel(0, fail_on=22)
    engine = make(model, EngineConfig(block_size=4, num_blocks=64, max_num_seqs=1, max_batch_tokens=16))
    sinks = [QueueSink() for _ in range(3)]
    for sink, prompt in zip(sinks, (good[0], [4, 22, 5], good[1]), strict=True):
        engine.submit(request(prompt), sink)
    drain(engine)
    with pytest.raises(StepFailed, match="on fire"):
        collect(sinks[1], 1)
    for sink, prompt in ((sinks[0], good[0]), (sinks[2], good[1])):
        assert list(collect(sink, 1).token_ids) == ToyModel(0).greedy(prompt, 12)
    assert engine.stats().num_failed_steps == 1


def test_a_bug_in_scheduling_fails_everyone_and_starts_clean_books(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(ToyModel())
    sink = QueueSink()
    engine.submit(request([1, 2, 3]), sink)
    monkeypatch.setattr(engine.core.scheduler, "schedule", lambda now: 1 / 0)
    engine.step()
    with pytest.raises(StepFailed, match="ZeroDivisionError"):
        collect(sink, 1)
    assert list(serve(engine, [request([1, 2, 3])])[0].token_ids) == ToyModel().greedy([1, 2, 3], 12)


def test_what_can_never_be_served_is_refused_with_the_numbers() -> None:
    engine = make(ToyModel())
    sink = QueueSink()
    with pytest.raises(RequestTooLong, match=r"250 tokens and 12 more .* at most 256") as caught:
        engine.submit(request([1] * 250), sink)
    assert (caught.value.num_prompt_tokens, caught.value.limit) == (250, 256)
    for bad, message in (
        (request([]), "no tokens"),
        (request([1, 23]), "token id 23; expected 0 to 22"),
        (request([1, -1]), "token id -1"),
        (request([1], SamplingParams(logit_bias={99: 1.0})), "logit_bias has token id 99"),
        (request([1], SamplingParams(stop_token_ids=(23,))), "stop_token_ids has token id 23"),
        (request([1, 2], score_from=3), "score_from is 3"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.submit(bad, sink)
    assert not engine.has_work()
    small = make(ToyModel(), EngineConfig(block_size=4, num_blocks=5, max_num_seqs=2, max_batch_tokens=8))
    with pytest.raises(RequestTooLong, match="5 blocks of 4"):
        small.submit(request([1] * 12), sink)
    with pytest.raises(OutOfMemoryPlan, match="blocks x 16 tokens"):
        make(ToyModel(), EngineConfig(kv_cache_bytes=64))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("logit_bias", {1: float("nan")}),
        ("max_tokens", -1),
        ("logprobs", 1000),
    ],
)
def test_sampling_options_out_of_range_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{option: value})  # type: ignore[arg-type]
    assert caught.value.param == option


def test_a_full_queue_refuses_with_an_estimate() -> None:
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=1, max_batch_tokens=16, max_waiting=2)
    engine = make(ToyModel(), config)
    sinks = [QueueSink() for _ in range(3)]
    engine.submit(request([1, 2]), sinks[0])
    engine.step()
    engine.submit(request([1, 3]), sinks[1])
    engine.submit(request([1, 4]), sinks[2])
    with pytest.raises(EngineOverloaded) as caught:
        engine.submit(request([1, 5]), QueueSink())
    assert caught.value.retry_after_s > 0
    drain(engine)
    assert all(collect(sink, 1).token_ids for sink in sinks)


def test_chunks_beside_decodes_follow_what_prompts_cost() -> None:
    config = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_batch_tokens=200, itl_target_s=10.0)
    now = [0.0]

    class Slow(ToyModel):
        def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
            now[0] += 0.25 * batch.num_tokens
            return super().forward(batch, kv)

    engine = make(Slow(), config, clock=lambda: now[0])
    serve(engine, [request([1] * 40)])
    engine.submit(request([1] * 10, SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)), QueueSink())
    engine.step()
    engine.submit(request([2] * 100), QueueSink())
    before = now[0]
    engine.step()
    assert now[0] - before == pytest.approx(10.0, abs=0.25)
    engine.set_itl_target(9.0)
    before = now[0]
    engine.step()
    assert now[0] - before == pytest.approx(9.0, abs=0.25)
    drain(engine)


def test_bills_add_up() -> None:
    ticks = iter(range(10_000))
    engine = make(ToyModel(), clock=lambda: float(next(ticks)))
    result = serve(engine, [request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))])[0]
    ending = result.ending
    assert (ending.num_prompt_tokens, ending.num_output_tokens) == (3, 5)
    assert 0 < ending.queue_s < ending.ttft_s < ending.total_s
    assert ending.itl_s > 0
    assert ending.compute_s > 0
    assert engine.stats().num_output_tokens == 5


@pytest.fixture
def threaded() -> Iterator[Engine]:
    engine = Engine(ToyModel(), SMALL)
    yield engine
    engine.close()
    engine.close()


async def test_streams_from_many_coroutines(threaded: Engine) -> None:
    model = ToyModel()

    async def one(prompt: list[int]) -> None:
        tokens: list[int] = []
        endings = 0
        async for event in threaded.stream(request(prompt)):
            if isinstance(event, TokenChunk):
                assert not endings
                tokens += event.token_ids
            else:
                endings += 1
        assert endings == 1
        assert tokens == model.greedy(prompt, 12)

    await asyncio.gather(*(one([i % 22 + 1, i % 7 + 1, 3]) for i in range(40)))


async def test_leaving_a_stream_frees_its_blocks(threaded: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    stream = threaded.stream(request([1, 2, 3], sampling))
    await anext(stream)
    assert threaded.scheduler.pool.num_owned > 0
    await stream.aclose()  # type: ignore[attr-defined]
    for _ in range(1000):
        if not threaded.has_work():
            break
        await asyncio.sleep(0.001)
    assert threaded.scheduler.pool.num_owned == 0


async def test_one_wake_up_per_step_and_loop(threaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wakes = 0
    original = loop.call_soon_threadsafe

    def count(*args: object, **kwargs: object) -> object:
        nonlocal wakes
        wakes += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    before = threaded.stats().num_steps
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
    results = await asyncio.gather(*(threaded.run(request([1, i + 1], sampling)) for i in range(4)))
    assert sum(len(r.token_ids) for r in results) == 80
    assert wakes <= threaded.stats().num_steps - before + 4


async def test_closing_ends_what_runs_with_an_error() -> None:
    engine = Engine(ToyModel(), SMALL)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    running = [asyncio.create_task(engine.run(request([1, i + 1], sampling))) for i in range(6)]
    await asyncio.sleep(0)
    await asyncio.to_thread(engine.close)
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(outcome, EngineClosed) or (isinstance(outcome, Result) and len(outcome.token_ids) == 254)
    with pytest.raises(EngineClosed):
        await engine.run(request([1]))
    assert engine.scheduler.pool.num_owned == 0


def test_background_waits_for_live() -> None:
    engine = make(ToyModel(), EngineConfig(block_size=4, num_blocks=64, max_num_seqs=1, max_batch_tokens=16))
    order: list[str] = []

    class Named(QueueSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def put(self, event: object) -> None:
            if isinstance(event, RequestEnding):
                order.append(self.name)

    for name, priority in (("b1", Priority.BACKGROUND), ("b2", Priority.BACKGROUND), ("live", Priority.LIVE)):
        engine.submit(request([1, 2], priority=priority), Named(name))
    drain(engine)
    assert order == ["live", "b1", "b2"]


def test_a_stop_check_that_raises_fails_its_own_request() -> None:
    class Broken:
        def push(self, token_id: int) -> bool:
            raise LookupError("no such thing")

    engine = make(ToyModel())
    sinks = [QueueSink(), QueueSink()]
    engine.submit(request([1, 2, 3], stop_check=Broken()), sinks[0])
    engine.submit(request([1, 2, 4]), sinks[1])
    drain(engine)
    with pytest.raises(StepFailed, match="no such thing"):
        collect(sinks[0], 1)
    assert list(collect(sinks[1], 1).token_ids) == ToyModel().greedy([1, 2, 4], 12)


def test_a_leak_is_found_when_idle_and_the_next_request_is_served(caplog: pytest.LogCaptureFixture) -> None:
    engine = make(ToyModel())
    engine.scheduler.pool.allocate(3)  # nobody's
    serve_one = engine.submit(request([1, 2, 3]), QueueSink())
    while engine.has_work():
        engine.step()
    assert not serve_one.block_table
    assert "3 blocks of model leaked" in caplog.text
    assert engine.stats().num_failed_steps == 1
    assert list(serve(engine, [request([1, 2, 3])])[0].token_ids) == ToyModel().greedy([1, 2, 3], 12)


kinds = st.sampled_from(["greedy", "seeded", "penalised", "scored", "pooled", "echoed"])


@pytest.mark.slow
@given(
    arrivals=st.lists(st.tuples(prompts, kinds, st.integers(0, 4), st.sampled_from(Priority)), min_size=1, max_size=8),
    drafting=st.sampled_from([None, "ngram", "model"]),
    cancelled=st.sets(st.integers(0, 7), max_size=2),
    seed=st.integers(0, 2),
)
@settings(max_examples=80, deadline=None)
def test_any_mixture_serves_each_as_if_alone(
    arrivals: list[tuple[list[int], str, int, Priority]], drafting: str | None, cancelled: set[int], seed: int
) -> None:
    """Every kind of request, arriving over time, drafted for or not, some cancelled, on a pool too small for all."""

    def build(index: int) -> Request:
        prompt, kind, _, priority = arrivals[index]
        shared = {"max_tokens": 10, "ignore_eos": index % 2 == 0}
        sampling = {
            "greedy": SamplingParams(temperature=0.0, **shared),
            "seeded": SamplingParams(temperature=0.9, seed=index, top_p=0.9, logprobs=1, **shared),
            "penalised": SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.2, **shared),
            "scored": SamplingParams(max_tokens=0, prompt_logprobs=1),
            "pooled": SamplingParams(temperature=0.0, **shared),
            "echoed": SamplingParams(temperature=0.0, prompt_logprobs=0, **shared),
        }[kind]
        scored = kind in ("scored", "echoed") and len(prompt) > 1
        return request(
            prompt, sampling, str(index), priority=priority, score_from=1 if scored else None, pooled=kind == "pooled"
        )

    model = ToyModel(seed)
    draft = ToyModel(seed, blur=1.5)
    drafter = {
        None: None,
        "ngram": NGramDrafter(longest=2, shortest=1),
        "model": ModelDrafter(draft, KVCache(draft.config, 24, 4), vocab_size=23, max_batch_tokens=8),
    }[drafting]
    speculator = None if drafter is None else Speculator(drafter, max_draft_tokens=3, adaptive=False)
    tight = EngineConfig(block_size=4, num_blocks=21, max_num_seqs=3, max_batch_tokens=9)
    engine = make(model, tight, speculator=speculator)
    sinks = [QueueSink() for _ in arrivals]
    for index, (_, _, pause, _) in enumerate(arrivals):
        for _ in range(pause):
            engine.step()
        handle = engine.submit(build(index), sinks[index])
        if index in cancelled:
            engine.step()
            engine.cancel(handle)
    drain(engine)
    assert engine.stats().num_failed_steps == 0
    if isinstance(drafter, ModelDrafter):
        drafter.pool.check_integrity([])
    for index, sink in enumerate(sinks):
        result = collect(sink, 1.0)
        alone = serve(make(model), [build(index)])[0]
        assert result.token_ids == alone.token_ids[: len(result.token_ids)]
        if result.ending.reason is not FinishReason.CANCELLED:
            assert result.token_ids == alone.token_ids
            assert result.logprobs == alone.logprobs
            assert result.ending.prompt_logprobs == alone.ending.prompt_logprobs
            assert result.ending.pooled == alone.ending.pooled
            assert result.ending.reason == alone.ending.reason
