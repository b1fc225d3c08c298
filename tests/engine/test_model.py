"""The decoder against Hugging Face on random checkpoints, and against itself under other batches, chunks and blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import Batch
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from tests.engine.checkpoints import make_reference, save_reference

# Every architecture and every switch that changes arithmetic. Each alone, so a failure names its cause.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 48}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn-mscale": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
BLOCK_SIZE = 8
NUM_PROMPT, NUM_NEW = 21, 24


def run_whole(model: DecoderModel, token_ids: list[int], *, block_size: int = BLOCK_SIZE) -> Tensor:
    """Logits of every position, in one step over blocks that lie backwards in the pool."""
    num_blocks = -(-len(token_ids) // block_size)
    kv = KVCache(model.config, num_blocks, block_size)
    table = list(reversed(range(num_blocks)))
    batch = Batch.build([token_ids], [len(token_ids)], [table], block_size=block_size, all_logits=True)
    return model.logits(model.forward(batch, kv))


def run_greedy(model: DecoderModel, prompt: list[int], num_new: int) -> list[int]:
    """Greedy tokens, one paged decode step each."""
    kv = KVCache(model.config, 16, BLOCK_SIZE)
    table = list(range(16))
    tokens, out = list(prompt), []
    for length in range(len(prompt), len(prompt) + num_new):
        hidden = model.forward(Batch.build([tokens], [length], [table], block_size=BLOCK_SIZE), kv)
        tokens = [int(model.logits(hidden[-1:]).argmax())]
        out += tokens
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(save_reference(make_reference(seed=3), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = tmp_path_factory.mktemp("mistral")
    return load_model(save_reference(make_reference("Mistral", seed=4, sliding_window=13), folder))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    reference = make_reference(architecture, seed=1, **overrides)
    model = load_model(save_reference(reference, tmp_path))
    prompt = random.Random(variant).sample(range(3, 211), NUM_PROMPT)
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        expected_logprobs = reference(torch.tensor([expected])).logits[0].log_softmax(-1)
    assert run_greedy(model, prompt, NUM_NEW) == expected[NUM_PROMPT:]
    logprobs = run_whole(model, expected).log_softmax(-1)
    assert (logprobs - expected_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ["llama", "qwen2-window", "qwen3"])
def test_bfloat16_choices_are_each_others_candidates(variant: str, tmp_path: Path) -> None:
    """bfloat16 keeps 8 bits, so near-ties may fall either way; a different token must be a near-tie."""
    architecture, overrides = VARIANTS[variant]
    reference = make_reference(architecture, seed=1, **overrides)
    save_reference(reference, tmp_path)
    model = load_model(tmp_path, dtype="bfloat16")
    tokens = random.Random(5).sample(range(3, 211), 64)
    kv = KVCache(model.config, 8, BLOCK_SIZE, dtype=model.dtype)
    batch = Batch.build([tokens], [64], [list(range(8))], block_size=BLOCK_SIZE, all_logits=True)
    ours = model.logits(model.forward(batch, kv))
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0]
    for row, expected in zip(ours, theirs, strict=True):
        assert int(row.argmax()) in expected.topk(3).indices
        assert int(expected.argmax()) in row.topk(3).indices


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_paged_equals_contiguous(llama: DecoderModel, block_size: int) -> None:
    """One block that holds all is a contiguous cache; any other size must agree with it."""
    tokens = random.Random(0).choices(range(211), k=64)
    whole = run_whole(llama, tokens, block_size=64)
    assert torch.allclose(run_whole(llama, tokens, block_size=block_size), whole, atol=2e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_any_schedule_gives_the_same_logits(name: str, request: pytest.FixtureRequest, data: st.DataObject) -> None:
    """Several sequences, cut into chunks and mixed into steps at random over scattered blocks, against each alone.

    Tolerance: other groupings sum the same float32 terms in another order.
    """
    model: DecoderModel = request.getfixturevalue(name)
    rng = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=6), label="lengths")
    sequences = [rng.choices(range(211), k=n) for n in lengths]
    expected = [run_whole(model, tokens) for tokens in sequences]
    tables, num_blocks = scattered_tables(lengths, rng)
    kv = KVCache(model.config, num_blocks, BLOCK_SIZE)
    for layer in kv.layers:
        layer.uniform_(-50.0, 50.0)  # what earlier owners left must not matter
    done = [0] * len(sequences)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        chosen = [i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7]
        if not chosen:
            continue
        rng.shuffle(chosen)
        steps = {i: min(rng.choice([1, 1, 2, 5, 40]), lengths[i] - done[i]) for i in chosen}
        batch = Batch.build(
            [sequences[i][done[i] : done[i] + steps[i]] for i in chosen],
            [done[i] + steps[i] for i in chosen],
            [tables[i] for i in chosen],
            block_size=BLOCK_SIZE,
            all_logits=True,
        )
        logits = model.logits(model.forward(batch, kv))
        row = 0
        for i in chosen:
            part = logits[row : row + steps[i]]
            assert torch.allclose(part, expected[i][done[i] : done[i] + steps[i]], atol=5e-5)
            row, done[i] = row + steps[i], done[i] + steps[i]


def scattered_tables(lengths: list[int], rng: random.Random) -> tuple[list[list[int]], int]:
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    ids = list(range(sum(counts)))
    rng.shuffle(ids)
    tables = []
    for count in counts:
        tables.append([ids.pop() for _ in range(count)])
    return tables, sum(counts)


def test_two_batches_share_one_model(llama: DecoderModel) -> None:
    """The model holds no state of a step: interleaving two pools gives each what it gets alone."""
    first, second = [5, 6, 7, 8], [9, 10, 11]
    pools = [KVCache(llama.config, 2, BLOCK_SIZE) for _ in range(2)]
    outs: list[list[Tensor]] = [[], []]
    for step in range(3):
        for which, tokens in enumerate((first, second)):
            batch = Batch.build([[tokens[step]]], [step + 1], [[0, 1]], block_size=BLOCK_SIZE)
            outs[which].append(llama.logits(llama.forward(batch, pools[which])))
    assert torch.allclose(torch.cat(outs[0]), run_whole(llama, first)[:3], atol=2e-5)
    assert torch.allclose(torch.cat(outs[1]), run_whole(llama, second), atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(llama: DecoderModel, tmp_path: Path) -> None:
    reference = make_reference(seed=3)
    model = load_model(save_reference(reference, tmp_path), device="cuda", dtype="float32")
    tokens = list(range(3, 60))
    kv = KVCache(model.config, 8, BLOCK_SIZE, device="cuda")
    batch = Batch.build([tokens], [57], [list(range(8))], block_size=BLOCK_SIZE, all_logits=True, device="cuda")
    ours = model.logits(model.forward(batch, kv)).cpu()
    assert torch.allclose(ours, run_whole(llama, tokens), atol=1e-2)  # TF32 products may be in use
