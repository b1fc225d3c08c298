"""The same engine on a CUDA device: held to transformers there, and to itself on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.builtin.paths import model_dir
from engine.config import EngineConfig
from engine.draft import ModelDrafter
from engine.engine import Engine, Result, collect
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from engine.speculator import Speculator
from engine.tokenize import Tokenizer
from tests.engine.checkpoints import make_reference, save_reference

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
        engine = Engine(load_model(model_dir(tier), dtype=torch.float32, device=device), SMALL)
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
