"""4-bit checkpoints: packing, the file formats, and every way of multiplying them, against dequantised weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.layers.linear import DenseLinear, ExactQuantLinear, GatedLinear
from engine.layers.linear_int4 import Int4Linear
from engine.layers.linear_int8 import Int8Linear, is_int8_exact
from engine.layers.quant import QuantWeight, pack_nibbles, unpack_nibbles
from engine.load.awq import AWQ_ORDER, unpack_awq
from engine.load.gptq import unpack_rows
from engine.load.linear import CpuCompute
from engine.load.model import load_model
from tests.engine.checkpoints import (
    dequantize_groups,
    make_reference,
    pack_awq,
    pack_rows,
    quantize_groups,
    save_quantized,
)
from tests.engine.test_model import run_greedy, run_whole

FILES: dict[str, dict[str, Any]] = {
    "awq": {"method": "awq", "symmetric": False},
    "awq-one-group": {"method": "awq", "symmetric": False, "group_size": -1},
    "gptq-sym": {"method": "gptq"},
    "gptq-asym": {"method": "gptq", "symmetric": False},
    "gptq-v2-asym": {"method": "gptq", "symmetric": False, "checkpoint_format": "gptq_v2"},
    "gptq-desc-act": {"method": "gptq", "desc_act": True},
    "gptq-desc-act-asym-v2": {
        "method": "gptq",
        "desc_act": True,
        "symmetric": False,
        "checkpoint_format": "gptq_v2",
    },
}
# Relative error of the logits, about twice the worst seen. The random model's wide weights amplify each layer's 1 %
# (int8) or 0.4 % (bfloat16) of rounding; a wrong nibble, zero point or group gives an error near 1.
NOISE: dict[CpuCompute, float] = {"exact": 1e-5, "int8": 0.12, "int4": 0.06}


def random_codes(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), words=st.integers(1, 5))
def test_packing_round_trips(seed: int, rows: int, words: int) -> None:
    codes = random_codes(seed, rows, 8 * words)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert torch.equal(unpack_awq(pack_awq(codes)), codes)
    assert torch.equal(unpack_rows(pack_rows(codes.t().contiguous())), codes.t())


def test_awq_words_are_laid_out_as_published() -> None:
    """The word 0x76543210 has nibble k = k at bits 4k; AWQ's order puts output AWQ_ORDER[k] there."""
    out = unpack_awq(torch.tensor([[0x76543210]], dtype=torch.int32))[0].tolist()
    assert [out[output] for output in AWQ_ORDER] == list(range(8))
    assert out == [0, 4, 1, 5, 2, 6, 3, 7]


def test_gptq_words_are_laid_out_as_published() -> None:
    assert unpack_rows(torch.tensor([[0x76543210]], dtype=torch.int32))[:, 0].tolist() == list(range(8))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), symmetric=st.booleans(), shuffled=st.booleans())
def test_dequantising_follows_the_definition(seed: int, symmetric: bool, shuffled: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(10, 64, generator=generator)
    groups = torch.arange(64) // 16
    if shuffled:
        groups = groups[torch.randperm(64, generator=generator)]
    codes, scales, zeros = quantize_groups(weight, 16, symmetric=symmetric, group_of_input=groups)
    order = torch.argsort(groups, stable=True) if shuffled else None
    in_order = codes if order is None else codes[:, order]
    packed = QuantWeight.from_codes(in_order, scales, zeros, 16, order)
    assert torch.equal(packed.dequantize(), dequantize_groups(codes, scales, zeros, groups))
    assert packed.nbytes < 0.5 * weight.nbytes


@pytest.mark.parametrize("compute", ["exact", "int8", "int4"])
@pytest.mark.parametrize("file", FILES)
def test_quantised_files_equal_their_dequantised_weights(file: str, compute: CpuCompute, tmp_path: Path) -> None:
    reference = save_quantized(make_reference(seed=2), tmp_path, **FILES[file])
    model = load_model(tmp_path, cpu_compute=compute)
    tokens = random.Random(6).choices(range(211), k=48)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    ours = run_whole(model, tokens)
    assert (ours - expected).norm() / expected.norm() < NOISE[compute]


@pytest.mark.parametrize("file", FILES)
def test_exact_greedy_tokens_equal_transformers(file: str, tmp_path: Path) -> None:
    reference = save_quantized(make_reference(seed=2), tmp_path, **FILES[file])
    prompt = [7, 70, 140, 30]
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, 4:].tolist()
    assert run_greedy(load_model(tmp_path, cpu_compute="exact"), prompt, 24) == expected


def test_every_linear_stays_in_four_bits_when_asked(tmp_path: Path) -> None:
    reference = save_quantized(make_reference(seed=2, vocab_size=64), tmp_path, "awq", symmetric=False)
    for compute in ("exact", "int4"):
        model = load_model(tmp_path, cpu_compute=compute)
        for layer in model.layers:
            assert isinstance(layer.gated, GatedLinear)
            for linear in (layer.qkv, layer.o, layer.gated.gate_up, layer.down):
                assert linear.weight_bytes < 0.7 * linear.in_features * linear.out_features
    assert sum(p.numel() for p in reference.parameters()) > 0


@pytest.mark.parametrize("compute", ["int8", "int4", "exact"])
def test_a_row_does_not_depend_on_its_neighbours(compute: Literal["int8", "int4", "exact"]) -> None:
    """The rows beside it change in size and number; the row's result must not change at all."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    groups = torch.arange(128) // 32
    packed = QuantWeight.from_codes(*quantize_groups(weight, 32, symmetric=False, group_of_input=groups), 32)
    layers = {
        "int8": lambda: Int8Linear.from_float(packed.dequantize()),
        "int4": lambda: Int4Linear(packed),
        "exact": lambda: ExactQuantLinear(packed),
    }
    layer = layers[compute]()
    row = torch.randn(1, 128, generator=generator)
    alone = layer(row)
    for num_others in (1, 2, 3, 7, 15, 33, 64):
        others = torch.randn(num_others, 128, generator=generator) * 10.0 ** (num_others % 5)
        together = layer(torch.cat((others[: num_others // 2], row, others[num_others // 2 :])))
        mine = together[num_others // 2]
        if compute == "exact":
            assert torch.allclose(mine, alone[0], atol=1e-4)  # BLAS picks other kernels for other row counts
        else:
            assert torch.equal(mine, alone[0])


# Elsewhere nothing is multiplied so: pairs of products saturate, and the loader takes another layer.
@pytest.mark.skipif(not is_int8_exact(), reason="this processor's 8-bit sums saturate")
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 20), magnitude=st.floats(1e-20, 1e20))
def test_int8_error_is_bounded_by_its_two_roundings(seed: int, rows: int, magnitude: float) -> None:
    """|error| <= sum_i |x_i| dw / 2 + |w_i| dx / 2 + dw dx / 4 with dw, dx the two steps: nothing saturates."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 40, generator=generator)
    x = torch.randn(rows, 40, generator=generator) * magnitude
    layer = Int8Linear.from_float(weight)
    step_w = weight.abs().amax(1) / 127
    step_x = x.abs().amax(1, keepdim=True) / 127
    bound = x.abs().sum(1, keepdim=True) * step_w / 2 + step_x * weight.abs().sum(1) / 2 + 40 * step_x * step_w / 4
    error = (layer(x).double() - x.double() @ weight.double().t()).abs()
    assert bool((error <= bound * 1.01).all())


def test_int8_zero_rows_and_extremes() -> None:
    assert is_int8_exact() in (True, False)
    layer = Int8Linear.from_float(torch.full((8, 16), 3.0), torch.arange(8.0))
    out = layer(torch.stack((torch.zeros(16), torch.full((16,), -2.0))))
    assert torch.allclose(out[0], torch.arange(8.0))
    assert torch.allclose(out[1], torch.arange(8.0) - 96.0, rtol=1e-5)


def test_nan_stays_in_its_row() -> None:
    layer = Int8Linear.from_float(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    rows = torch.ones(3, 16)
    rows[1, 4] = float("nan")
    out = layer(rows)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], layer(torch.ones(2, 16)))


def test_auto_keeps_small_matrices_exact(tmp_path: Path) -> None:
    save_quantized(make_reference(seed=2), tmp_path, "gptq")
    model = load_model(tmp_path)
    assert all(isinstance(layer.o, DenseLinear) for layer in model.layers)


def test_skipped_modules_are_read_dense(tmp_path: Path) -> None:
    """A file may leave modules unquantised; what is there decides."""
    from safetensors.torch import load_file, save_file

    reference = save_quantized(make_reference(seed=2), tmp_path, "awq", symmetric=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{suffix}"]
    tensors[f"{name}.weight"] = reference.get_parameter(f"{name}.weight").detach().half()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, cpu_compute="exact")
    assert isinstance(model.layers[1].down, DenseLinear)
    tokens = [3, 4, 5]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert torch.allclose(run_whole(model, tokens), expected, atol=0.05)
