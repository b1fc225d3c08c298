"""The runner of a GPU on a CPU, through its kernels' references: what is served is what the plain runner serves."""

from __future__ import annotations

import contextlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from engine.batch import Batch
from engine.config import EngineConfig
from engine.device.drafter import DeviceDrafter
from engine.device.graph_cache import GraphCache, bucket
from engine.device.step_buffers import BlockTables, StepShape, device_fields, host_fields
from engine.device.step_shapes import whole_tiles
from engine.drafter import ModelDrafter, NGramDrafter
from engine.engine import Engine, Result, collect
from engine.errors import NonFiniteLogits
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import FinishReason, Priority, Request, SamplingParams, ThinkingBudget
from engine.runner import Flight, StepResult
from engine.scheduler import StepPlan
from engine.sink import QueueSink
from engine.speculator import Speculator
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.no_memory import NoMemory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[DecoderModel]:
    """A target and a worse model of the same kind."""
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    sizes = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    return [
        load_model(save_reference(make_reference("Qwen3", seed=seed, **sizes), folder))
        for seed, folder in enumerate(folders)
    ]


def make(model: DecoderModel, runner: str, speculator: Speculator | None = None, **sizes: int) -> Engine:
    config = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 5, "max_batch_tokens": 16} | sizes
    return Engine(
        model,
        EngineConfig(runner=runner, asynchronous=runner == "device", **config),  # type: ignore[arg-type]
        start=False,
        speculator=speculator,
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


def build(index: int, prompt: list[int], kind: str) -> Request:
    shared = {"max_tokens": 10, "ignore_eos": index % 2 == 0}
    greedy = SamplingParams(temperature=0.0, **shared)  # type: ignore[arg-type]
    sampling = {
        "scaled": SamplingParams(temperature=0.8, seed=-index, **shared),  # type: ignore[arg-type]
        "filtered": SamplingParams(temperature=0.9, seed=2**63 + index, top_p=0.9, top_k=9, min_p=0.01, **shared),  # type: ignore[arg-type]
        "reported": SamplingParams(temperature=0.0, logprobs=2, **shared),  # type: ignore[arg-type]
        "penalised": SamplingParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=1.2, **shared),  # type: ignore[arg-type]
        "weighed": SamplingParams(temperature=0.9, seed=index, top_p=0.95, frequency_penalty=0.7, logprobs=3, **shared),  # type: ignore[arg-type]
        "corrected": SamplingParams(temperature=0.7, seed=index, repetition_penalty=1.6, logprobs=0, **shared),  # type: ignore[arg-type]
        "scored": SamplingParams(max_tokens=0, prompt_logprobs=1),
        "held": SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=tuple(range(30)), max_tokens=10),
    }.get(kind, greedy)
    return Request(
        str(index),
        tuple(prompt),
        sampling,
        priority=Priority(index % 2),
        score_from=1 if kind == "scored" and len(prompt) > 1 else None,
        pooled=kind == "pooled",
        thinking={
            "thinking": ThinkingBudget(close_id=7, close_ids=(7, 9), max_tokens=3),
            "corrected": ThinkingBudget(close_id=7, close_ids=(7,), max_tokens=3),
        }.get(kind),
    )


ON_DEVICE = ("greedy", "scaled", "filtered", "reported", "penalised", "weighed", "corrected", "thinking")
KINDS = (*ON_DEVICE, "scored", "held", "pooled")
prompts = st.lists(st.integers(3, 60), min_size=1, max_size=24)


def device_drafter(draft: DecoderModel, num_blocks: int = 64, most: int = 3) -> DeviceDrafter:
    return DeviceDrafter(
        draft,
        KVCache(draft.config, num_blocks, 4),
        vocab_size=draft.config.vocab_size,
        max_draft_tokens=most,
        max_sequences=5,
        max_batch_tokens=8,
    )


def differs_at_a_tie(model: DecoderModel, request: Request, ours: Result, theirs: Result) -> bool:
    """Whether greedy answers part where two tokens are equally likely: the passes sum in different orders."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None or request.sampling.temperature != 0.0 or request.sampling.presence_penalty:
        return False
    tokens = [*request.prompt_ids, *ours.token_ids[:place]]
    blocks = -(-len(tokens) // 4)
    batch = Batch.build([tokens], [len(tokens)], [list(range(blocks))], block_size=4)
    logits = model.logits(model.forward(batch, KVCache(model.config, blocks, 4)))[-1]
    return bool((logits[ours.token_ids[place]] - logits[theirs.token_ids[place]]).abs() < 1e-4)


@pytest.mark.slow
@given(
    arrivals=st.lists(st.tuples(prompts, st.sampled_from(KINDS), st.integers(0, 3)), min_size=1, max_size=7),
    drafting=st.sampled_from([None, None, "ngram", "model", "device", "device"]),
    cancelled=st.sets(st.integers(0, 6), max_size=1),
    num_blocks=st.sampled_from([16, 64]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_mixture_serves_each_as_the_plain_runner_does_alone(
    models: list[DecoderModel],
    arrivals: list[tuple[list[int], str, int]],
    drafting: str | None,
    cancelled: set[int],
    num_blocks: int,
) -> None:
    target, draft = models
    speculator = None
    if drafting == "ngram":
        speculator = Speculator(NGramDrafter(longest=2, shortest=1), max_draft_tokens=3, adaptive=False)
    elif drafting == "model":
        drafter = ModelDrafter(draft, KVCache(draft.config, 64, 4), vocab_size=61, max_batch_tokens=8)
        speculator = Speculator(drafter, max_draft_tokens=3, adaptive=False)
    elif drafting == "device":
        # Too small a pool for all of them: some are dropped and caught up with again.
        speculator = Speculator(device_drafter(draft, num_blocks=24), max_draft_tokens=3, adaptive=False)
    engine = make(target, "device", speculator, num_blocks=num_blocks)
    sinks = [QueueSink() for _ in arrivals]
    for index, (prompt, kind, pause) in enumerate(arrivals):
        for _ in range(pause):
            engine.step()
        handle = engine.submit(build(index, prompt, kind), sinks[index])
        if index in cancelled:
            engine.step()
            engine.step()
            engine.cancel(handle)
    while engine.has_work():
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.stats().num_failed_steps == 0
    if speculator is not None and isinstance(speculator.drafter, DeviceDrafter):
        speculator.drafter.pool.check_integrity([])
    for index, (sink, (prompt, kind, _)) in enumerate(zip(sinks, arrivals, strict=True)):
        result = collect(sink, 1.0)
        expected = serve(make(target, "plain"), [build(index, prompt, kind)])[0]
        if differs_at_a_tie(target, build(index, prompt, kind), result, expected):
            continue
        assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        if result.ending.reason is FinishReason.CANCELLED:
            continue
        assert result.token_ids == expected.token_ids
        assert result.ending.reason == expected.ending.reason
        for ours, theirs in zip(
            (*result.logprobs, *result.ending.prompt_logprobs),
            (*expected.logprobs, *expected.ending.prompt_logprobs),
            strict=True,
        ):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        if kind == "pooled":
            assert result.ending.pooled == pytest.approx(expected.ending.pooled, abs=1e-4)


@pytest.mark.parametrize("kind", ON_DEVICE)
def test_steps_are_launched_ahead_whatever_the_device_draws(models: list[DecoderModel], kind: str) -> None:
    engine = make(models[0], "device")
    in_flight = most = 0
    launch, collect_step = engine.core.runner.launch, engine.core.runner.collect

    def noting_launch(plan: StepPlan) -> Flight:
        nonlocal in_flight, most
        in_flight += bool(plan.items)
        most = max(most, in_flight)
        return launch(plan)

    def noting_collect(flight: Flight) -> list[StepResult]:
        nonlocal in_flight
        in_flight -= 1
        return collect_step(flight)

    engine.core.runner.launch = noting_launch  # type: ignore[method-assign]
    engine.core.runner.collect = noting_collect  # type: ignore[method-assign]
    requests = [build(2 * index, [3 + index, 9, 4], kind) for index in range(3)]
    results = serve(engine, requests)
    assert most == 2
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == serve(make(models[0], "plain"), [request])[0].token_ids


def test_more_penalised_sequences_than_lines_take_turns(models: list[DecoderModel]) -> None:
    """Two fit a step, eight come at once and are preempted: lines change hands and are written anew."""
    sizes = {"max_num_seqs": 2, "num_blocks": 9, "max_batch_tokens": 8}
    engine = make(models[0], "device", **sizes)
    requests = [build(2 * index, [3 + index, 9, 4, 5 + index, 6, 7], "weighed") for index in range(8)]
    requests += [build(2 * index, [3 + index] * 9, "penalised") for index in range(4)]
    for request, result in zip(requests, serve(engine, requests), strict=True):
        alone = serve(make(models[0], "plain"), [request])[0]
        assert result.token_ids == alone.token_ids
        assert [token.rank for token in result.logprobs] == [token.rank for token in alone.logprobs]


def test_a_twin_is_believed_and_a_worse_model_changes_nothing(models: list[DecoderModel]) -> None:
    target, draft = models
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = [Request(str(i), tuple(range(3 + i, 12 + 4 * i)), sampling) for i in range(4)]
    plain = serve(make(target, "plain"), requests)
    for drafter, is_twin in ((device_drafter(target), True), (device_drafter(draft), False)):
        speculator = Speculator(drafter, max_draft_tokens=3, adaptive=False)
        results = serve(make(target, "device", speculator), requests)
        drafter.pool.check_integrity([])
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        assert speculator.num_drafted > 40
        assert (speculator.num_accepted == speculator.num_drafted) == is_twin


@pytest.mark.slow
def test_sampled_drafts_follow_the_targets_distribution(tmp_path: Path) -> None:
    """Unseeded, on a vocabulary of 6: the second and third token against the target's own probabilities."""
    sizes = {"vocab_size": 6, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1}
    target, draft = (
        load_model(save_reference(make_reference("Llama", seed=seed, **sizes), tmp_path / str(seed))) for seed in (3, 4)
    )
    prompt = (1, 3, 4, 5, 1)
    sampling = SamplingParams(temperature=1.5, max_tokens=4, ignore_eos=True)
    speculator = Speculator(
        DeviceDrafter(draft, KVCache(draft.config, 256, 4), vocab_size=6, max_draft_tokens=3, max_sequences=32),
        max_draft_tokens=3,
        adaptive=False,
    )
    engine = make(target, "device", speculator, max_num_seqs=32, num_blocks=256, max_batch_tokens=256, max_waiting=4000)
    count = 2000
    results = serve(engine, [Request(str(i), prompt, sampling) for i in range(count)])
    assert 0 < speculator.num_accepted < speculator.num_drafted
    expected: Counter[tuple[int, ...]] = Counter()
    tables = [list(range(3))]

    def following(tokens: tuple[int, ...]) -> list[float]:
        batch = Batch.build([list(tokens)], [len(tokens)], tables, block_size=4)
        logits = target.logits(target.forward(batch, KVCache(target.config, 3, 4)))[-1]
        probs: list[float] = torch.softmax(logits.double() / 1.5, -1).tolist()
        return probs

    for a, p_a in enumerate(following(prompt)):
        for b, p_b in enumerate(following((*prompt, a))):
            for c, p_c in enumerate(following((*prompt, a, b))):
                expected[b, c] += p_a * p_b * p_c  # type: ignore[assignment]
    observed = Counter(result.token_ids[1:3] for result in results)
    common = [pair for pair in expected if expected[pair] * count >= 5]
    assert sum(expected[pair] for pair in common) > 0.98
    counts, wanted = [observed[pair] for pair in common], [expected[pair] * count for pair in common]
    assert stats.chisquare(counts, wanted, sum_check=False).pvalue > 1e-3


def test_more_sequences_than_the_ladder_has_steps_are_padded(models: list[DecoderModel]) -> None:
    engine = make(models[0], "device", max_num_seqs=11, max_batch_tokens=64, num_blocks=128)
    requests = [build(index, [3 + index, 9, 4, 8], "scaled" if index % 3 else "greedy") for index in range(11)]
    alone = [serve(make(models[0], "plain"), [request])[0].token_ids for request in requests]
    assert [result.token_ids for result in serve(engine, requests)] == alone


def test_nan_fails_its_own_request_only(models: list[DecoderModel], tmp_path: Path) -> None:
    model = load_model(save_reference(make_reference("Llama"), tmp_path))
    good = Request("good", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    expected = serve(make(model, "plain"), [good])[0].token_ids
    poisoned = next(token for token in range(3, 200) if token not in (5, 6, 7, *expected))
    model.embedding = model.embedding.clone()
    model.embedding[poisoned] = float("nan")
    engine = make(model, "device")
    sinks = [QueueSink(), QueueSink()]
    engine.submit(Request("bad", (5, poisoned, 7), good.sampling), sinks[0])
    engine.submit(good, sinks[1])
    while engine.has_work():
        engine.step()
    with pytest.raises(NonFiniteLogits):
        collect(sinks[0], 1.0)
    assert collect(sinks[1], 1.0).token_ids == expected
    assert serve(engine, [good])[0].token_ids == expected


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9))
def test_fields_lie_apart_and_aligned_on_both_sides(num_tokens: int, num_sequences: int, num_rows: int) -> None:
    shape = StepShape(num_tokens, num_sequences, num_rows)
    buffer = torch.zeros(shape.num_bytes, dtype=torch.uint8)
    host, device = host_fields(buffer, shape), device_fields(buffer, shape)
    names = list(host.__dataclass_fields__)
    for value, name in enumerate(names, start=1):
        getattr(host, name)[:] = value
    for value, name in enumerate(names, start=1):
        field = getattr(device, name)
        assert field.tolist() == [value] * len(getattr(host, name))
        assert (field.data_ptr() - buffer.data_ptr()) % 16 == 0


@pytest.mark.parametrize("kind", ["scaled", "weighed"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_steps_without_memory_leave_the_one_in_flight_alone(models: list[DecoderModel], times: int, kind: str) -> None:
    """Each try puts one sequence back; the step in flight keeps its tokens however often there is another try."""
    requests = [build(index, [3 + index, 9, 4], kind) for index in range(5)]
    engine = make(models[0], "device")
    sinks = [QueueSink() for _ in requests]
    engine.submit_all(list(zip(requests, sinks, strict=True)))
    for _ in range(3):
        engine.step()
    with NoMemory(torch.Tensor.index_select, times) as memory:
        engine.step()
    assert not memory.times_left
    assert engine.stats().num_preemptions == times
    while engine.has_work():
        engine.step()
    for request, sink in zip(requests, sinks, strict=True):
        assert collect(sink, 1.0).token_ids == serve(make(models[0], "plain"), [request])[0].token_ids


# Where a launch may find no memory: the function that does, and whether it has done its work by then.
PLACES = {
    "scoring": ("engine.runner.token_logprobs", False),
    "pooled": ("engine.runner._pool", True),
    "counting": ("engine.device.runner.count_tokens", False),
    "counted": ("engine.device.runner.count_tokens", True),
    "reporting": ("engine.device.logprob_buffers.LogprobBuffers.keep", False),
    "drawn": ("engine.device.runner.DeviceRunner._draw", True),
    "landing": ("engine.device.logprob_buffers.LogprobBuffers.land", True),
}


def find_no_memory(monkeypatch: pytest.MonkeyPatch, place: str, times: int) -> list[int]:
    """Let one of ``PLACES`` raise so many times; returns the times left, to be looked at."""
    name, works_first = PLACES[place]
    left = [times]
    function = pkgutil.resolve_name(name)

    def failing(*args: object, **kwargs: object) -> object:
        if not left[0]:
            return function(*args, **kwargs)
        if works_first:
            function(*args, **kwargs)
        left[0] -= 1
        raise torch.OutOfMemoryError("out of memory (simulated)")

    monkeypatch.setattr(name, failing)
    return left


# The places that only "weighed" comes by, and those that every kind does.
EVERYWHERE = [(place, "weighed") for place in PLACES]
EVERYWHERE += [(place, kind) for place in ("scoring", "pooled", "drawn") for kind in ("greedy", "scaled", "penalised")]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("runner", "place", "kind"),
    [*(("device", *case) for case in EVERYWHERE), ("plain", "scoring", "greedy"), ("plain", "pooled", "penalised")],
)
def test_a_step_without_memory_changes_no_answer_wherever_it_finds_none(
    models: list[DecoderModel], monkeypatch: pytest.MonkeyPatch, runner: str, place: str, times: int, kind: str
) -> None:
    """Two answers in flight beside a prompt to pool, in two chunks, and one to score."""
    prompts = {kind: [3, 9, 4], "pooled": [*range(10, 30)], "scored": [*range(20, 50)]}
    requests = [build(0, prompts[kind], kind), build(2, [5, *prompts[kind]], kind)]
    requests += [build(4, prompts["pooled"], "pooled"), build(6, prompts["scored"], "scored")]
    expected = [serve(make(models[0], "plain"), [request])[0] for request in requests]
    engine = make(models[0], runner, max_batch_tokens=28)
    sinks = [QueueSink() for _ in requests]
    engine.submit_all(list(zip(requests[:2], sinks[:2], strict=True)))
    for _ in range(3):
        engine.step()
    engine.submit_all(list(zip(requests[2:], sinks[2:], strict=True)))
    left = find_no_memory(monkeypatch, place, times)
    while engine.has_work():
        engine.step()
    assert left == [0]
    assert engine.stats().num_preemptions == times
    assert engine.stats().num_failed_steps == 0
    engine.scheduler.check_integrity()
    for sink, alone in zip(sinks, expected, strict=True):
        result = collect(sink, 1.0)
        assert result.token_ids == alone.token_ids
        assert [token.rank for token in result.logprobs] == [token.rank for token in alone.logprobs]
        scores = [token.logprob for token in result.ending.prompt_logprobs]
        assert scores == pytest.approx([token.logprob for token in alone.ending.prompt_logprobs], abs=1e-4)
        assert result.ending.pooled == (alone.ending.pooled and pytest.approx(alone.ending.pooled, abs=1e-4))


@pytest.mark.parametrize("failing", [torch.Tensor.copy_, torch.Tensor.index_select])
def test_a_step_without_memory_for_drafts_does_without(
    models: list[DecoderModel], failing: object, caplog: pytest.LogCaptureFixture
) -> None:
    """On the way of the drafter's input to the device, and in its first pass; said once until there is memory again."""
    target, draft = models
    drafter = device_drafter(draft)
    engine = make(target, "device", Speculator(drafter, max_draft_tokens=3, adaptive=False))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [Request(str(i), tuple(range(3 + i, 9 + 2 * i)), sampling) for i in range(3)]
    sinks = [QueueSink() for _ in requests]
    engine.submit_all(list(zip(requests, sinks, strict=True)))
    for _ in range(3):
        engine.step()
    for has_memory, num_warnings in ((False, 1), (False, 1), (True, 1), (False, 2)):
        with NoMemory(failing, times=not has_memory) as memory:
            engine.step()
        assert not memory.times_left
        assert caplog.text.count("no memory for drafts") == num_warnings
    while engine.has_work():
        engine.step()
    assert engine.stats().num_failed_steps == engine.stats().num_preemptions == 0
    drafter.pool.check_integrity([])
    for request, sink in zip(requests, sinks, strict=True):
        result = collect(sink, 1.0)
        assert result.ending.num_draft_tokens > 0
        assert result.token_ids == serve(make(target, "plain"), [request])[0].token_ids


@given(st.data())
@settings(deadline=None)
def test_tables_on_the_device_are_the_sequences_own(data: st.DataObject) -> None:
    """Rows change hands, grow, shrink and grow into other blocks."""
    tables = BlockTables(4, 9, torch.device("cpu"))
    rows: list[list[int]] = [[], [], [], []]
    for turn in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, 4))
        for row in range(count):
            keep = data.draw(st.integers(0, len(rows[row])))
            more = data.draw(st.lists(st.integers(0, 50), max_size=9 - keep, min_size=0 if keep else 1))
            rows[row] = rows[row][:keep] + more
            tables.set(row, rows[row])
        if data.draw(st.booleans()):
            with NoMemory(torch.Tensor.to), contextlib.suppress(torch.OutOfMemoryError):
                tables.upload(turn)
            continue  # the step after this one makes up for it
        tables.upload(turn)
        for row in range(count):
            assert tables.tensor[row, : len(rows[row])].tolist() == rows[row]
            positions = np.arange(4 * len(rows[row]))
            found = tables.slots(np.full(len(positions), row), positions, 4)
            assert found.tolist() == [block * 4 + offset for block in rows[row] for offset in range(4)]


@given(num_tokens=st.integers(1, 5000))
def test_whole_tiles_are_at_most_what_there_is(num_tokens: int) -> None:
    whole = whole_tiles(num_tokens)
    assert 0 < whole <= num_tokens
    assert num_tokens - whole < (32 if num_tokens <= 128 else 64)
    assert num_tokens < 32 or whole % (32 if num_tokens <= 128 else 64) == 0


def test_sizes_go_up_to_the_next_of_the_ladder() -> None:
    assert [bucket(n) for n in (1, 3, 8, 9, 33, 129, 512, 513)] == [1, 4, 8, 16, 40, 160, 512, None]


def test_without_a_gpu_every_run_is_the_function_itself() -> None:
    graphs = GraphCache("model", enabled=False)
    calls = [graphs.run("key", lambda: torch.ones(1)) for _ in range(3)]
    assert len(calls) == 3
    assert (len(graphs), graphs.num_replays) == (0, 0)


class RecordedCaptures(GraphCache):
    """Without a GPU: says what it would have captured, and that this failed."""

    def __init__(self) -> None:
        super().__init__("model", enabled=False)
        self.is_enabled = True
        self.keys: list[Hashable] = []

    def _capture(self, key: Hashable, function: Callable[[], Tensor | None]) -> None:
        self.keys.append(key)


def test_a_step_is_captured_once_it_ran_to_its_end() -> None:
    """A first run without memory compiled what came before that, and memory is short for a capture too."""
    graphs = RecordedCaptures()

    def run(key: str) -> Tensor | None:
        return graphs.run(key, lambda: torch.ones(2).index_select(0, torch.tensor([0])))

    for _ in range(2):
        with NoMemory(torch.Tensor.index_select), pytest.raises(torch.OutOfMemoryError):
            run("key")
    assert run("key") is not None
    assert (graphs.keys, graphs.has_failed) == ([], False)
    run("other")
    run("key")
    assert graphs.keys == ["key"]
