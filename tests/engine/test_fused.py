"""The forward pass of a GPU, run through its kernels' references: the plain pass's hidden states and cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Batch
from engine.kernels.paged_step import PagedStep
from engine.kv_cache import KVCache
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.models.fused import StepTensors
from tests.engine.checkpoints import make_reference, save_quantized, save_reference

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def both_passes(model: DecoderModel) -> tuple[tuple[torch.Tensor, KVCache], tuple[torch.Tensor, KVCache]]:
    """A prefill, then a step that decodes one sequence, goes on with the prompt of another, and checks 3 drafts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 211, (64,), generator=generator).tolist()
    results = []
    for run in (lambda b, kv: model.forward(b, kv), lambda b, kv: model.fused.forward(StepTensors.of(b), kv)):
        kv = KVCache(model.config, 12, 8)
        first = Batch.build(
            [tokens[:9], tokens[9:16], tokens[16:37]], [9, 7, 21], [[3, 1], [5], [0, 7, 2]], block_size=8
        )
        second = Batch.build(
            [tokens[40:41], tokens[41:55], tokens[55:59]],
            [10, 21, 25],
            [[3, 1], [5, 4, 6], [0, 7, 2, 9]],
            block_size=8,
        )
        with torch.inference_mode():
            out = torch.cat([run(first, kv), run(second, kv)])
        results.append((out, kv))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 11}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
def test_both_passes_give_the_same_states_and_cache(
    architecture: str, options: dict[str, object], tmp_path: Path
) -> None:
    model = load_model(save_reference(make_reference(architecture, **options), tmp_path))
    (plain, plain_kv), (fused, fused_kv) = both_passes(model)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(fused_kv.layers, plain_kv.layers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_padding_rows_write_nothing_and_leave_the_others_alone(tmp_path: Path) -> None:
    model = load_model(save_reference(make_reference(), tmp_path))
    kv = KVCache(model.config, 4, 8)
    batch = Batch.build([[5], [6]], [1, 1], [[0], [1]], block_size=8)
    step = StepTensors.of(batch)
    padded = StepTensors(
        token_ids=torch.cat((step.token_ids, torch.zeros(2, dtype=torch.int64))),
        positions=torch.cat((step.positions, torch.zeros(2, dtype=torch.int64))),
        paged=PagedStep(
            block_tables=torch.cat((step.paged.block_tables, torch.full((2, 1), 99, dtype=torch.int32))),
            context_lens=torch.cat((step.paged.context_lens, torch.zeros(2, dtype=torch.int32))),
            query_starts=torch.arange(5, dtype=torch.int32),
            slots=torch.cat((step.paged.slots, torch.full((2,), -1))),
            max_query_len=1,
        ),
    )
    with torch.inference_mode():
        alone = model.fused.forward(step, KVCache(model.config, 4, 8))
        among = model.fused.forward(padded, kv)
    torch.testing.assert_close(among[:2], alone)
    assert among.isfinite().all()
    assert all(not layer[2:].any() for layer in kv.layers)


def test_quantised_layers_take_the_kernels_layout_where_they_can(tmp_path: Path) -> None:
    from engine.kernels.int4 import Int4Weight
    from engine.layers.linear import ExactQuantLinear
    from engine.layers.linear_gpu import GpuInt4Linear

    save_quantized(make_reference(), tmp_path, "awq", symmetric=False)
    layer = load_model(tmp_path, cpu_compute="exact").layers[0]
    assert isinstance(layer.down, ExactQuantLinear)
    ours = GpuInt4Linear(Int4Weight.repack(layer.down.weight))
    x = torch.randn(5, layer.down.in_features, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), layer.down(x), rtol=1e-3, atol=1e-3)
    assert GpuInt4Linear.supports(layer.down.weight, torch.bfloat16)
    assert not GpuInt4Linear.supports(layer.down.weight, torch.float32)
