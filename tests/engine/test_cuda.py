"""The same engine on a CUDA device: held to transformers there, and to itself on the CPU."""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path

import pytest
import torch

from backends.builtin.paths import model_dir
from engine.batch import Batch
from engine.config import EngineConfig
from engine.device.drafter import DeviceDrafter
from engine.device.runner import DeviceRunner
from engine.device.warm_up import larger_sizes, padded_decodes
from engine.drafter import ModelDrafter
from engine.engine import Engine, Result, collect
from engine.errors import NonFiniteLogits
from engine.grammar_cursor import GrammarCursor
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from engine.speculator import Speculator
from engine.tokenizer import Tokenizer
from tests.engine.checkpoints import make_reference, save_reference
from tests.engine.grammars import tokenizer
from tests.engine.test_constrained import variants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=8, max_batch_tokens=64)
QUESTIONS = ("What is 17 + 25?", "Sort these numbers: 9, 3, 7, 1.", "Which is larger, 481 or 418?", "What is 12 * 34?")


def serve(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[Result]:
    sinks = [QueueSink() for _ in prompts]
    for index, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        engine.submit(Request(f"r{index}", tuple(prompt), sampling), sink)
    return [collect(sink, 120.0) for sink in sinks]


def serve_and_close(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[Result]:
    try:
        return serve(engine, prompts, sampling)
    finally:
        engine.close()


def widened(config: EngineConfig = SMALL, **changes: object) -> EngineConfig:
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(3, 200, (3 + 5 * i % 31,), generator=generator).tolist() for i in range(count)]


@pytest.fixture
def model(tmp_path: Path) -> DecoderModel:
    """A random model in bfloat16, which the kernels compute."""
    made = load_model(save_reference(make_reference("Qwen3"), tmp_path), dtype=torch.bfloat16, device="cuda")
    assert made.prefers_fused
    return made


def worst_gap(model: DecoderModel, prompt: list[int], answer: list[int]) -> float:
    """How far below the likeliest token an answer's tokens lie, at most, when all are computed in one go."""
    tokens = prompt + answer
    blocks = -(-len(tokens) // 16)
    batch = Batch.build([tokens], [len(tokens)], [list(range(blocks))], block_size=16, all_logits=True, device="cuda")
    kv = KVCache(model.config, blocks, 16, dtype=model.dtype, device="cuda")
    logits = model.logits(model.forward(batch, kv))[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


def prompts_of(tier: int) -> list[list[int]]:
    tokenizer = Tokenizer(model_dir(tier))
    return [tokenizer.encode(question) for question in QUESTIONS]


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_are_transformers_or_a_near_tie(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = make_reference(architecture).to("cuda", dtype)
    model = load_model(save_reference(reference, tmp_path), dtype=dtype, device="cuda")
    prompt = [3, 50, 7, 120, 9, 33, 81]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine = Engine(model, SMALL)
    try:
        ours = list(serve(engine, [prompt, prompt[:3], prompt[2:]], sampling)[0].token_ids)
    finally:
        engine.close()
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + ours], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(ours, device="cuda")[:, None])[:, 0]
    # bfloat16 keeps 8 bits: logits of about 10 are 0.06 apart, and sums in another order move them by a few of those.
    tolerance = 1e-3 if dtype == torch.float32 else 0.25
    assert (logits.max(dim=1).values - chosen).max().item() <= tolerance


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_built_in_weights_answer_as_they_do_on_the_cpu(tier: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=0)
    answers = []
    for device in ("cpu", "cuda"):
        # Tiers in 4 bits are computed exactly on a GPU in float32, so let the CPU do the same.
        model = load_model(model_dir(tier), dtype=torch.float32, device=device, cpu_compute="exact")
        engine = Engine(model, SMALL)
        try:
            answers.append(serve(engine, prompts_of(tier), sampling))
        finally:
            engine.close()
    for on_cpu, on_cuda in zip(*answers, strict=True):
        assert on_cpu.token_ids == on_cuda.token_ids


def test_speculation_on_the_device_keeps_the_targets_greedy_tokens() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    target = load_model(model_dir(3), dtype=torch.float32, device="cuda")
    draft = load_model(model_dir(1), dtype=torch.float32, device="cuda")
    kv = KVCache(draft.config, 128, 16, device="cuda")
    speculator = Speculator(
        ModelDrafter(draft, kv, vocab_size=target.config.vocab_size), max_draft_tokens=4, adaptive=False
    )
    results = []
    for chosen in (None, speculator):
        engine = Engine(target, SMALL, speculator=chosen)
        try:
            results.append([result.token_ids for result in serve(engine, prompts_of(3), sampling)])
        finally:
            engine.close()
    assert results[0] == results[1]
    assert speculator.num_accepted > 0


SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=11, max_tokens=30, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_and_flight_change_nothing(model: DecoderModel, sampling: SamplingParams) -> None:
    """Captured or launched one by one, waited for or not: the same kernels on the same numbers."""
    prompts = random_prompts(5)
    answers = {}
    for captured, asynchronous in ((False, False), (True, False), (True, True)):
        engine = Engine(model, widened(asynchronous=asynchronous), start=False)
        runner = engine.core.runner
        assert isinstance(runner, DeviceRunner)
        runner.graphs.is_enabled = captured
        for turn in range(2):  # the second time every graph is there
            sinks = [QueueSink() for _ in prompts]
            for sink, prompt in zip(sinks, prompts, strict=True):
                engine.submit(Request("r", tuple(prompt), sampling, cache_salt=str(turn)), sink)
            while engine.has_work():
                engine.step()
            answers[captured, asynchronous, turn] = [collect(sink, 1.0).token_ids for sink in sinks]
        assert (runner.graphs.num_replays > 0) == captured
        engine.close()
    assert len(set(map(tuple, answers.values()))) == 1, answers


def test_alone_and_in_a_full_batch(model: DecoderModel) -> None:
    prompts = random_prompts(40)
    config = widened(num_blocks=1024, max_num_seqs=40, max_batch_tokens=512)
    crowded = serve_and_close(Engine(model, config), prompts, GREEDY)
    for prompt, result in zip(prompts, crowded, strict=True):
        assert len(result.token_ids) == 30
        assert worst_gap(model, prompt, list(result.token_ids)) <= 0.25


def test_every_option_is_served_by_the_device_or_the_host(model: DecoderModel) -> None:
    engine = Engine(model, widened(max_num_seqs=8, max_batch_tokens=128))
    shared = {"max_tokens": 12, "ignore_eos": True}
    options = [
        SamplingParams(temperature=0.0, **shared),  # type: ignore[arg-type]
        SamplingParams(temperature=1.0, seed=1, **shared),  # type: ignore[arg-type]
        SamplingParams(temperature=0.7, seed=2, min_p=0.05, **shared),  # type: ignore[arg-type]
        SamplingParams(temperature=0.0, logprobs=3, **shared),  # type: ignore[arg-type]
        SamplingParams(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.2, **shared),  # type: ignore[arg-type]
        SamplingParams(temperature=0.9, seed=3, logit_bias={5: 3.0}, min_tokens=5, **shared),  # type: ignore[arg-type]
        SamplingParams(max_tokens=0, prompt_logprobs=2),
    ]
    try:
        sinks = [QueueSink() for _ in options]
        for sampling, sink in zip(options, sinks, strict=True):
            scored = 1 if sampling.max_tokens == 0 else None
            engine.submit(Request("r", (5, 9, 4, 8, 7), sampling, score_from=scored), sink)
        results = [collect(sink, 120.0) for sink in sinks]
    finally:
        engine.close()
    assert [len(result.token_ids) for result in results] == [12] * 6 + [0]
    assert len(results[3].logprobs) == 12
    assert len(results[6].ending.prompt_logprobs) == 4
    assert engine.stats().num_failed_steps == 0


def test_nan_fails_its_own_request_only(model: DecoderModel) -> None:
    good = [5, 6, 7, 8]
    expected = serve_and_close(Engine(model, SMALL), [good], GREEDY)[0].token_ids
    poisoned = next(token for token in range(3, 200) if token not in (*good, *expected))
    with torch.inference_mode():
        model.embedding[poisoned] = float("nan")
    engine = Engine(model, SMALL)
    try:
        sinks = [QueueSink(), QueueSink()]
        engine.submit(Request("bad", (5, poisoned, 7), GREEDY), sinks[0])
        engine.submit(Request("good", tuple(good), GREEDY), sinks[1])
        with pytest.raises(NonFiniteLogits):
            collect(sinks[0], 120.0)
        assert collect(sinks[1], 120.0).token_ids == expected
        assert serve(engine, [good], GREEDY)[0].token_ids == expected
    finally:
        engine.close()


def test_nothing_waits_for_the_device_while_steps_are_launched(model: DecoderModel) -> None:
    engine = Engine(model, SMALL, start=False)
    for index, prompt in enumerate(random_prompts(4)):
        engine.submit(Request(str(index), tuple(prompt), SAMPLED), QueueSink())
    for _ in range(20):
        engine.step()
    core = engine.core
    assert core._flight is not None
    try:
        with warnings.catch_warnings():
            # PyTorch says once in a process that the mode is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        with core.runner.on_stream():
            for _ in range(3):
                # Waiting for an event is not among what this mode forbids; copies that block are.
                before, core._flight = core._flight, core._launch(core.scheduler.schedule(0.0), [])
                assert before is not None
                core._land(before, [])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()


def test_several_engines_beside_one_another(model: DecoderModel) -> None:
    prompts = random_prompts(6)
    engines = [Engine(model, SMALL, name=str(index)) for index in range(4)]
    try:
        for turn in range(2):
            sinks = [[QueueSink() for _ in prompts] for _ in engines]
            for engine, row in zip(engines, sinks, strict=True):
                for prompt, sink in zip(prompts, row, strict=True):
                    engine.submit(Request("r", tuple(prompt), GREEDY, cache_salt=str(turn)), sink)
            for row in sinks:
                for prompt, sink in zip(prompts, row, strict=True):
                    assert worst_gap(model, prompt, list(collect(sink, 120.0).token_ids)) <= 0.25
    finally:
        for engine in engines:
            engine.close()


def test_larger_decodes_are_captured_when_an_engine_is_quiet(model: DecoderModel) -> None:
    """Of 40 and 48 sequences, greedy and at a temperature; they write nothing, and 40 requests then replay them."""
    engine = Engine(model, widened(max_num_seqs=48))
    try:
        runner = engine.core.runner
        assert isinstance(runner, DeviceRunner)
        before = [layer.clone() for layer in runner.kv.layers]
        engine.when_quiet(padded_decodes(engine, larger_sizes(engine, 32)))
        until_s = time.monotonic() + 60.0
        while engine._chores is not None and time.monotonic() < until_s:
            time.sleep(0.1)
        assert len(runner.graphs) == 4
        assert all(map(torch.equal, runner.kv.layers, before))
        others = runner.graphs.num_others
        # A prompt of one token is a decode to the runner, so all steps are of 40 sequences.
        prompts, sinks = [[3 + i] for i in range(40)], [QueueSink() for _ in range(40)]
        engine.submit_all([(Request("r", tuple(p), GREEDY), sink) for p, sink in zip(prompts, sinks, strict=True)])
        for prompt, sink in zip(prompts, sinks, strict=True):
            assert worst_gap(model, prompt, list(collect(sink, 120.0).token_ids)) <= 0.25
        assert runner.graphs.num_others == others
        assert runner.graphs.num_replays == GREEDY.max_tokens
    finally:
        engine.close()


def test_a_capture_that_runs_out_of_memory_is_done_without(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", no_memory)
    prompts = random_prompts(3)
    for prompt, result in zip(prompts, serve_and_close(Engine(model, SMALL), prompts, GREEDY), strict=True):
        assert worst_gap(model, prompt, list(result.token_ids)) <= 0.25
    assert "could not be captured (OutOfMemoryError" in caplog.text


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_drafts_of_the_device_change_nothing(model: DecoderModel, sampling: SamplingParams) -> None:
    """The target drafts for itself: all that is drafted stands but for ties that the two shapes of step round apart."""
    drafter = DeviceDrafter(
        model,
        KVCache(model.config, 256, 16, dtype=model.dtype, device="cuda"),
        vocab_size=model.config.vocab_size,
        max_draft_tokens=4,
        max_sequences=8,
    )
    speculator = Speculator(drafter, max_draft_tokens=4, adaptive=False)
    engine = Engine(model, SMALL, speculator=speculator)
    prompts = random_prompts(5)
    for prompt, result in zip(prompts, serve_and_close(engine, prompts, sampling), strict=True):
        assert len(result.token_ids) == 30
        if sampling is GREEDY:
            assert worst_gap(model, prompt, list(result.token_ids)) <= 0.25
    assert speculator.num_accepted > 0.8 * speculator.num_drafted > 0
    assert len(drafter.graphs) > 0


def test_unseeded_drafts_follow_the_targets_distribution(tmp_path: Path) -> None:
    """On a vocabulary of 6: the second token's frequencies against the target's own probabilities."""
    sizes = {"vocab_size": 6, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    target, draft = (
        load_model(
            save_reference(make_reference("Llama", seed=seed, **sizes), tmp_path / str(seed)),
            dtype=torch.bfloat16,
            device="cuda",
        )
        for seed in (3, 4)
    )
    kv = KVCache(draft.config, 512, 16, dtype=draft.dtype, device="cuda")
    drafter = DeviceDrafter(draft, kv, vocab_size=6, max_draft_tokens=3, max_sequences=32)
    speculator = Speculator(drafter, max_draft_tokens=3, adaptive=False)
    count, prompt = 3000, [1, 3, 4, 5, 1]
    config = widened(num_blocks=512, max_num_seqs=32, max_batch_tokens=512, max_waiting=count)
    sampling = SamplingParams(temperature=1.5, max_tokens=3, ignore_eos=True)
    results = serve_and_close(Engine(target, config, speculator=speculator), [prompt] * count, sampling)
    assert 0 < speculator.num_accepted < speculator.num_drafted

    def following(tokens: list[int]) -> list[float]:
        batch = Batch.build([tokens], [len(tokens)], [[0]], block_size=16, device="cuda")
        kv = KVCache(target.config, 1, 16, dtype=target.dtype, device="cuda")
        probs: list[float] = torch.softmax(target.logits(target.forward(batch, kv))[-1].double() / 1.5, -1).tolist()
        return probs

    first = following(prompt)
    expected = torch.zeros(6, dtype=torch.float64)
    for token, probability in enumerate(first):
        expected += probability * torch.tensor(following([*prompt, token]), dtype=torch.float64)
    observed = torch.bincount(torch.tensor([result.token_ids[1] for result in results]), minlength=6).double()
    # Five degrees of freedom: beyond 20.5 with probability 0.001.
    assert float(((observed - count * expected) ** 2 / (count * expected)).sum()) < 20.5


@pytest.mark.parametrize("drafts", [False, True])
def test_every_answer_on_the_device_is_of_its_grammar(tmp_path: Path, drafts: bool) -> None:
    """First eager, then captured, beside requests without a grammar and with every option of sampling."""
    sizes = {"vocab_size": tokenizer().vocab_size, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    folder = save_reference(make_reference("Qwen3", **sizes), tmp_path / "model")
    model = load_model(folder, device="cuda", dtype="bfloat16")
    kept = [each for each in variants() if not each.sampling.repetition_penalty > 1.0]
    for config in (widened(), widened(runner="plain")):
        drafter = None
        if drafts and config.runner != "plain":
            cache = KVCache(model.config, 256, 16, dtype=model.dtype, device=model.device)
            drafter = DeviceDrafter(
                model, cache, vocab_size=model.config.vocab_size, max_draft_tokens=3, max_sequences=8
            )
        speculator = None if drafter is None else Speculator(drafter, max_draft_tokens=3, adaptive=False)
        engine = Engine(model, config, eos_token_ids=tokenizer().eos_token_ids, speculator=speculator)
        try:
            for _ in range(3):
                sinks = [QueueSink() for _ in kept]
                engine.submit_all(list(zip(kept, sinks, strict=True)))
                results = [collect(sink, 300.0) for sink in sinks]
                _check_forms(kept, results)
        finally:
            engine.close()


def _check_forms(asked: list[Request], results: list[Result]) -> None:
    for request, result in zip(asked, results, strict=True):
        if request.constraint is None:
            continue
        cursor = GrammarCursor(request.constraint)
        tokens = list(result.token_ids)
        assert cursor.num_allowed(tokens) == len(tokens)
