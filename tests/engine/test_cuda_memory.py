"""Memory shared by engines on a GPU, and what goes wrong there when it really does."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine import device_faults
from engine.arena import Arena, _ArenaHandover
from engine.bench.kernel_cases import time_us
from engine.config import EngineConfig
from engine.device.runner import DeviceRunner
from engine.engine import Engine, Result, collect
from engine.errors import NonFiniteLogits, OutOfMemoryPlan, StepFailed
from engine.kernels.paged_attention import paged_attention
from engine.kernels.paged_step import PagedStep
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from engine.slabs import SharedPool, slab_bytes_for
from tests.engine.checkpoints import make_reference, save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LIKELY = replace(GREEDY, logprobs=5)
# bfloat16 keeps 8 bits: logits of about 10 are 0.06 apart, and sums in another order move them by a few of those.
ROUNDING = 0.25
PENALISED = SamplingParams(
    temperature=0.8,
    seed=5,
    top_p=0.9,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logprobs=5,
    max_tokens=40,
    ignore_eos=True,
)
SIZES = EngineConfig(block_size=16, context_length=128, max_num_seqs=8, max_batch_tokens=64)
PRIVATE = EngineConfig(block_size=16, num_blocks=256, context_length=128, max_num_seqs=8, max_batch_tokens=64)
SLAB = 7 << 14


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[DecoderModel]:
    """Two of unlike shape, so that their blocks are of unlike size."""
    shapes: tuple[tuple[str, dict[str, int]], ...] = (("Qwen3", {}), ("Llama", {"num_hidden_layers": 3}))
    return [
        load_model(
            save_reference(make_reference(name, seed=seed, **changes), tmp_path_factory.mktemp(name)),
            dtype=torch.bfloat16,
            device="cuda",
        )
        for seed, (name, changes) in enumerate(shapes)
    ]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    device_faults._lost.clear()
    gc.collect()
    torch.cuda.empty_cache()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 200, (3 + 7 * i % 60,), generator=generator).tolist() for i in range(count)]


def submit(engine: Engine, all_prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[QueueSink]:
    sinks = [QueueSink() for _ in all_prompts]
    for index, (prompt, sink) in enumerate(zip(all_prompts, sinks, strict=True)):
        engine.submit(Request(f"r{index}", tuple(prompt), sampling), sink)
    return sinks


def serve(engine: Engine, all_prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[Result]:
    return [collect(sink, 120.0) for sink in submit(engine, all_prompts, sampling)]


def differ_by_rounding(alone: Result, beside: Result) -> bool:
    """Whether two greedy answers are as likely token by token, and where they part, both all but the likeliest."""
    for mine, other in zip(alone.logprobs, beside.logprobs, strict=True):
        likely = dict(mine.top)
        if abs(likely.get(other.token_id, float("-inf")) - other.logprob) > ROUNDING:
            return False
        if mine.token_id != other.token_id:
            return mine.logprob - likely[other.token_id] <= ROUNDING
    return True


def test_engines_in_one_arena_answer_by_captured_graphs_as_alone(models: list[DecoderModel]) -> None:
    """Both run short again and again, on threads and streams of their own.

    In bfloat16 a batch's sums may differ from a lone row's in the last bit, and a near-tie then falls the other way; a
    block that two wrote into, or that was used too early, moves what is likely by far more.
    """
    expected = []
    for model in models:
        engine = Engine(model, PRIVATE)
        expected.append([[serve(engine, [prompt], LIKELY)[0] for prompt in prompts(16, turn)] for turn in range(3)])
        engine.close()
    arena = Arena(60 * SLAB, "cuda", slab_bytes=SLAB)
    engines = [Engine(model, SIZES, arena=arena, name=str(i)) for i, model in enumerate(models)]
    held: list[set[int]] = [set(), set()]
    for turn in range(3):
        sinks = [submit(engine, prompts(16, turn), LIKELY) for engine in engines]
        while any(engine.has_work() for engine in engines):
            for engine, seen in zip(engines, held, strict=True):
                pool = engine.scheduler.pool
                assert isinstance(pool, SharedPool)
                seen.add(pool.num_slabs)
            arena.slabs.check_integrity()
            time.sleep(0.002)
        for which, of_engine in enumerate(sinks):
            for sink, alone in zip(of_engine, expected[which][turn], strict=True):
                assert differ_by_rounding(alone, collect(sink, 120.0))
    for engine in engines:
        assert engine.stats().num_failed_steps == 0
        runner = engine.core.runner
        assert isinstance(runner, DeviceRunner)
        assert runner.graphs.num_replays > 20
        assert len(held[engines.index(engine)]) > 3, "slabs moved"
        engine.close()
    assert arena.slabs.num_free == arena.slabs.num_slabs


def test_a_slab_is_written_by_its_new_owner_only_after_the_old_ones_work() -> None:
    arena = Arena(2 * SLAB, "cuda", slab_bytes=SLAB)
    region = arena.storage[:SLAB]
    one, two = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    first, second = (_ArenaHandover(arena.storage, SLAB) for _ in range(2))
    with torch.cuda.stream(one):
        first.enter(0, None, is_foreign=True)
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        region.fill_(7)
        mark = first.leave()
    with torch.cuda.stream(two):
        second.enter(0, mark, is_foreign=True)
    torch.cuda.synchronize()
    assert not region.any(), "the old owner's late write came after the new owner's zeros"


def test_attention_over_an_arena_is_that_over_memory_of_its_own() -> None:
    num_blocks, heads, dim, layers = 4096, 8, 128, 20
    wide = torch.randn(num_blocks, layers, 16, 2, heads, dim, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)[: 32 * 128].view(32, 128)
    lens = torch.full((32,), 2048, dtype=torch.int32, device="cuda")
    starts = torch.arange(33, dtype=torch.int32, device="cuda")
    q = torch.randn(32, 64, dim, device="cuda", dtype=torch.bfloat16)

    step = PagedStep(tables, lens, starts, slots=torch.full((32,), -1, device="cuda"), max_query_len=1)

    def attend(cache: torch.Tensor) -> torch.Tensor:
        return paged_attention(q, cache, step, scale=dim**-0.5)

    torch.testing.assert_close(attend(wide[:, 3]), attend(wide[:, 3].contiguous()), rtol=0.0, atol=0.0)
    apart = [wide[:, i].contiguous() for i in range(8)]
    times = {
        name: round(time_us([partial(attend, cache) for cache in caches]) / 1e3, 4)
        for name, caches in (("apart", apart), ("arena", list(wide.unbind(1)[:8])))
    }
    print(f"\nattention, 32 x 2,048 keys, ms a layer: {times}")


def test_penalties_and_logprobs_are_captured_and_launched_ahead(models: list[DecoderModel]) -> None:
    answers = {}
    for captured, asynchronous in ((False, False), (True, True)):
        config = EngineConfig(
            block_size=16, num_blocks=256, max_num_seqs=8, max_batch_tokens=64, asynchronous=asynchronous
        )
        engine = Engine(models[0], config, start=False)
        runner = engine.core.runner
        assert isinstance(runner, DeviceRunner)
        runner.graphs.is_enabled = captured
        sinks = submit(engine, prompts(5), PENALISED)
        while engine.has_work():
            engine.step()
        answers[captured] = [collect(sink, 1.0) for sink in sinks]
        assert (runner.graphs.num_replays > 10) == captured
        engine.close()
    for plain, graph in zip(answers[False], answers[True], strict=True):
        assert plain.token_ids == graph.token_ids
        assert plain.logprobs == graph.logprobs
        assert all(len(each.top) == 5 and each.logprob <= 0.0 for each in graph.logprobs)


# Faults that happen


@contextmanager
def memory_left(num_bytes: int) -> Iterator[None]:
    """Let this process take no more of the device than it has, and ``num_bytes``."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_no_memory_at_load_is_a_refusal_with_numbers(models: list[DecoderModel]) -> None:
    with memory_left(300 << 20), pytest.raises(OutOfMemoryPlan, match=r"cuda has no [\d,]+ bytes left for keys and"):
        Arena(2 << 30, "cuda")
    with pytest.raises(OutOfMemoryPlan, match="KV cache needs"):
        Engine(models[0], EngineConfig(kv_cache_bytes=1000))
    assert Arena(2 << 30, "cuda").slabs.num_free == (2 << 30) // slab_bytes_for(2 << 30)


def test_no_memory_in_a_step_fails_one_request_and_serves_the_rest(tmp_path: Path) -> None:
    """2,000 tokens of a wide layer take over 60 MB; 32 are left."""
    wide = make_reference("Llama", intermediate_size=8192, max_position_embeddings=4096)
    model = load_model(save_reference(wide, tmp_path), dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, EngineConfig(block_size=16, num_blocks=400, max_num_seqs=4, max_batch_tokens=4096))
    small = prompts(3)
    for _ in range(3):
        expected = [serve(engine, [prompt])[0].token_ids for prompt in small]
    too_large = Request("large", tuple([5] * 2000), GREEDY)
    with memory_left(32 << 20):
        sink = QueueSink()
        engine.submit(too_large, sink)
        with pytest.raises(StepFailed, match="out of memory"):
            collect(sink, 120.0)
        assert [serve(engine, [prompt])[0].token_ids for prompt in small] == expected
    assert len(collect_after(engine, too_large).token_ids) == 40
    assert engine.scheduler.pool.num_owned == 0
    engine.close()


def collect_after(engine: Engine, request: Request) -> Result:
    sink = QueueSink()
    engine.submit(request, sink)
    return collect(sink, 120.0)


def test_nan_in_a_layer_fails_who_meets_it_and_nobody_later(tmp_path: Path) -> None:
    model = load_model(save_reference(make_reference("Llama"), tmp_path), dtype=torch.bfloat16, device="cuda")
    arena = Arena(60 * SLAB, "cuda", slab_bytes=SLAB)
    engine = Engine(model, SIZES, arena=arena)
    good = [[5, 6, 7, 8], [9, 10, 11]]
    expected = [result.token_ids for result in serve(engine, good)]
    weight = model.layers[0].input_norm.weight
    sound = weight.clone()
    with torch.inference_mode():
        weight.fill_(float("nan"))
    for sink in submit(engine, [[12, 13, 14], [15, 16]]):
        with pytest.raises(NonFiniteLogits):
            collect(sink, 120.0)
    with torch.inference_mode():
        weight.copy_(sound)
    torch.cuda.synchronize()
    assert [result.token_ids for result in serve(engine, good)] == expected
    assert arena.storage.view(torch.bfloat16).isfinite().all(), "a NaN stayed in the memory"
    engine.close()


LOST = """
    import sys, torch
    from pathlib import Path
    from engine.arena import Arena
    from engine.config import EngineConfig
    from engine.engine import Engine, collect
    from engine.errors import DeviceLost
    from engine.load.model import load_model
    from engine.request import Request, SamplingParams
    from engine.sink import QueueSink

    folder = Path(sys.argv[1])
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    sizes = EngineConfig(block_size=16, context_length=128, max_num_seqs=4, max_batch_tokens=64)
    model = load_model(folder, dtype=torch.bfloat16, device="cuda")
    arena = Arena(60 * (7 << 14), "cuda", slab_bytes=7 << 14)
    engines = [Engine(model, sizes, arena=arena, name=str(i), start=False) for i in range(2)]
    host = Engine(load_model(folder), EngineConfig(num_blocks=64, context_length=128), name="host", start=False)

    def run(engine, prompt=(5, 6, 7)):
        sink = QueueSink()
        engine.submit(Request("r", prompt, greedy), sink)
        while engine.has_work():
            engine.step()
        return collect(sink, 1.0).token_ids

    before = [run(engine) for engine in (*engines, host)]
    launch = engines[0].core.runner.launch

    def broken(plan):
        flight = launch(plan)
        torch._assert_async(torch.zeros((), device="cuda"))  # a kernel that finds its input impossible
        return flight

    engines[0].core.runner.launch = broken
    other = QueueSink()
    engines[1].submit(Request("r", (5, 6, 7), greedy), other)
    engines[1].step()
    for attempt in (lambda: run(engines[0]), lambda: finish(engines[1], other), lambda: run(engines[0])):
        try:
            attempt()
        except DeviceLost as error:
            print("LOST", error.device)
    assert run(host) == before[2]
    for engine in (*engines, host):
        engine.close()
    print("SERVED")
"""
FINISH = """
    def finish(engine, sink):
        while engine.has_work():
            engine.step()
        return collect(sink, 1.0)
"""


def test_a_lost_device_ends_its_engines_and_leaves_the_others(tmp_path: Path) -> None:
    save_reference(make_reference("Llama"), tmp_path)
    script = textwrap.dedent(FINISH) + textwrap.dedent(LOST)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert lines in ([*["LOST cuda"] * 3, "SERVED"], [*["LOST cuda:0"] * 3, "SERVED"]), (
        done.stdout + done.stderr[-3000:]
    )
