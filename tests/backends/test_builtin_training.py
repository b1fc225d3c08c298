"""The training script's parts, run small and for real on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from backends.builtin.conversations import TrainingMix
from backends.builtin.paths import model_dir
from backends.builtin.reference import load_reference
from backends.builtin.tasks.task_generator import UNIFORM_MIX
from backends.builtin.tasks.types import GRADES
from backends.builtin.train.batches import BUCKETS, draw_batches
from backends.builtin.train.export import export
from backends.builtin.train.loop import RunConfig, Trainer, learning_rate_scale, load_trained, loss_of, rounding_share
from backends.builtin.train.network import Network
from backends.builtin.train.specs import SPECS, TierSpec

TOKENIZER = model_dir(1) / "tokenizer.json"


def _tiny(tier: int) -> TierSpec:
    mix = TrainingMix(0.5, UNIFORM_MIX, UNIFORM_MIX)
    return replace(SPECS[tier], num_layers=1, tokens_per_step=1024, mix=mix)


@pytest.fixture
def tokenizer() -> Tokenizer:
    torch.set_num_threads(1)
    return Tokenizer.from_file(str(TOKENIZER))


def _randomised(spec: TierSpec) -> Network:
    """Weights large enough that rounding shows, embeddings and norms exact in float16."""
    torch.manual_seed(0)
    network = Network(spec)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.05)
            if "proj." not in name:
                parameter.copy_(parameter.half().float())
    return network


@pytest.mark.parametrize("tier", [1, 3])
def test_the_export_computes_what_was_trained(tier: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = _randomised(_tiny(tier))
    export(network, tokenizer, tmp_path, {})
    reference: LlamaForCausalLM = load_reference(tmp_path)
    ids = torch.randint(0, 1536, (2, 50))
    with torch.no_grad():
        trained = network.logits(network(ids, torch.ones(())))
        raw = network.logits(network(ids, torch.zeros(())))
        read = reference(ids).logits
    # float32 sums in another order
    assert torch.allclose(trained, read, atol=1e-4)
    assert not torch.allclose(raw, read, atol=1e-1), "the rounding is without effect, so the test shows nothing"


def test_going_on_starts_from_the_exported_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    network = _randomised(_tiny(1))
    export(network, tokenizer, tmp_path, {})
    loaded = Network(_tiny(1))
    load_trained(loaded, tmp_path)
    ids = torch.randint(0, 1536, (1, 20))
    with torch.no_grad():
        before = network(ids, torch.ones(()))
        after = loaded(ids, torch.ones(()))
    # The unpacked weights lie on the grid; asked to round again they move by float16's error in the scale at most.
    assert torch.allclose(before, after, atol=2e-2)


def test_batches_are_deterministic_and_marked(tokenizer: Tokenizer) -> None:
    spec = _tiny(3)
    first, second = (list(islice(draw_batches(spec, TOKENIZER, "seed"), 4)) for _ in range(2))
    other = next(draw_batches(spec, TOKENIZER, "another"))
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.array_equal(a.kind, b.kind)
    assert not np.array_equal(first[0].token_ids, other.token_ids)
    for batch in first:
        assert batch.token_ids.size >= spec.tokens_per_step
        for ids, kind in zip(batch.token_ids, batch.kind, strict=True):
            assert sorted(kind.tolist()[: (kind > 0).sum()]) == kind.tolist()[: (kind > 0).sum()]
            completion = tokenizer.decode(ids[kind == 2].tolist(), skip_special_tokens=False)
            assert completion.endswith("<|im_end|>")
            assert tokenizer.decode(ids[kind == 1].tolist(), skip_special_tokens=False).startswith("<|im_start|>")


@pytest.mark.slow
def test_a_batch_is_learnt_and_exported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    spec = _tiny(1)
    config = RunConfig(minutes=60, seed=1, device="cpu", folder=tmp_path, compile=False)
    lines: list[str] = []
    trainer = Trainer(spec, config, tokenizer, lines.append)
    batch = next(draw_batches(spec, TOKENIZER, "seed"))
    ids, kind = (torch.from_numpy(a.astype("int64")) for a in (batch.token_ids, batch.kind))
    before = loss_of(trainer.network, ids, kind, trainer.share, torch.float32).item()
    for step in range(25):
        trainer._step(batch, 0.2 + step / 50)
    after = loss_of(trainer.network, ids, kind, trainer.share, torch.float32).item()
    assert after < before / 2
    assert trainer.share.item() == 1.0
    record = trainer.run([])
    assert record["num_steps"] == 25
    assert (tmp_path / "tier1" / "model.safetensors").is_file()
    assert lines[0].startswith("tier 1")


@pytest.mark.parametrize("tier", SPECS)
def test_the_script_writes_what_was_shipped(tier: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Names, shapes and types of the tensors, the configuration and the tokenizer's files, byte for byte."""
    network = Network(SPECS[tier])
    export(network, tokenizer, tmp_path, {})
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (model_dir(tier) / name).read_text(), name
    written, shipped = (load_file(str(folder / "model.safetensors")) for folder in (tmp_path, model_dir(tier)))
    assert {name: (each.shape, each.dtype) for name, each in written.items()} == {
        name: (each.shape, each.dtype) for name, each in shipped.items()
    }
    training = json.loads((model_dir(tier) / "training.json").read_text())
    assert sum(parameter.numel() for parameter in network.parameters()) == training["num_parameters"]


def test_the_rounding_is_in_force_as_far_as_its_share_says(tokenizer: Tokenizer) -> None:
    network, ids = _randomised(_tiny(1)), torch.arange(20)[None]
    with torch.no_grad():
        raw, half, rounded = (network(ids, torch.tensor(share)) for share in (0.0, 0.5, 1.0))
    assert not torch.allclose(raw, rounded, atol=1e-3)
    assert (half - raw).norm() < (rounded - raw).norm()


def test_a_position_sees_nothing_that_follows(tokenizer: Tokenizer) -> None:
    network = _randomised(_tiny(3))
    first = torch.randint(0, 1536, (1, 30))
    second = torch.cat([first[:, :20], torch.randint(0, 1536, (1, 10))], dim=1)
    with torch.no_grad():
        before, after = (network(ids, torch.ones(())) for ids in (first, second))
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_padding_carries_no_loss_and_a_prompt_little(tokenizer: Tokenizer) -> None:
    network = _randomised(_tiny(1))
    ids, kind = torch.randint(0, 1536, (2, 24)), torch.full((2, 24), 2)
    kind[:, 16:] = 0

    def loss(ids: torch.Tensor, kind: torch.Tensor) -> float:
        with torch.no_grad():
            return loss_of(network, ids, kind, torch.zeros(()), torch.float32).item()

    other = ids.clone()
    other[:, 17:] = 0
    assert loss(other, kind) == pytest.approx(loss(ids, kind), rel=1e-5)
    assert loss(ids[:, :16], kind[:, :16]) == pytest.approx(loss(ids, kind), rel=1e-5)
    # A prompt's tokens alone weigh as much as completions alone: the weight only tells them apart.
    assert loss(ids[:, :16], torch.ones((2, 16), dtype=torch.int64)) == pytest.approx(loss(ids, kind), rel=1e-5)
    mixed = kind.clone()
    mixed[:, :8] = 1
    assert loss(ids, mixed) != pytest.approx(loss(ids, kind), rel=1e-3)


def test_a_tiers_measures_fit_its_layout() -> None:
    for tier, spec in SPECS.items():
        assert spec.tier == tier
        assert spec.hidden_size == spec.num_heads * spec.head_dim
        assert spec.num_heads % spec.num_kv_heads == 0
        for size in (spec.hidden_size, spec.intermediate_size):
            assert size % spec.group_size == 0
        assert spec.tokens_per_step >= BUCKETS[-1]
        for mix in (spec.mix.direct, spec.mix.thinking):
            assert set(mix) == set(GRADES)
            assert sum(mix.values()) == pytest.approx(1)


def test_schedules() -> None:
    assert learning_rate_scale(0.0) == 0.0
    assert learning_rate_scale(0.2) == 1.0
    assert learning_rate_scale(1.0) == 0.0
    assert rounding_share(0.1) == 0.0
    assert rounding_share(0.99) == 1.0
    rates = [learning_rate_scale(0.5 + i / 100) for i in range(50)]
    assert rates == sorted(rates, reverse=True)
