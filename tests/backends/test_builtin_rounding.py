"""The cost of 8-bit activations is measured with the arithmetic that it names, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from backends.builtin.paths import model_dir
from backends.builtin.reference import load_reference
from backends.builtin.rounding import compare, rounded_activations
from backends.builtin.tasks.task_generator import generate
from engine.kernels.fp8 import quantize_rows_reference


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@torch.inference_mode()
def test_within_the_block_projections_read_rounded_rows() -> None:
    model = load_reference(model_dir(1))
    projection = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, projection.in_features, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(20)[None]
    plain, plain_out = model(ids).logits, projection(x)
    with rounded_activations(model):
        noisy, noisy_out = model(ids).logits, projection(x)
    data, factors = quantize_rows_reference(x)
    torch.testing.assert_close(noisy_out, F.linear(data.float() * factors, projection.weight))
    assert 0.01 < float((noisy_out - plain_out).norm() / plain_out.norm()) < 0.05
    assert not torch.equal(noisy, plain)
    assert torch.equal(model(ids).logits, plain)


def test_the_comparison_adds_up() -> None:
    tasks = list(generate(3, 6, split="test"))
    found = compare(model_dir(1), tasks, thinking=False, batch_size=6)
    assert found["right_rounded"] == found["right"] - found["lost"] + found["won"]
    assert 0 <= found["same_answer"] <= found["tasks"] == len(tasks)
    assert found["kl"] > 0
    assert 0 < found["mean_absolute_change"] < 0.2
    change = torch.tensor(found["perplexity"] / found["perplexity_rounded"]).log()
    assert float(change) == pytest.approx(found["mean_logprob_change"], abs=2e-4)
