"""The references hold the kernels to account, so they are held to the engine's own layers here, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import RopeConfig
from engine.errors import UnsupportedQuantization
from engine.kernels.fp8 import Fp8Weight, fp8_linear, quantize_rows
from engine.kernels.fused import rms_norm, rope_and_write_kv, rope_tables, silu_and_mul
from engine.kernels.int4 import Int4Weight, alternate, int4_linear
from engine.kernels.int4_fp8 import int4_fp8_linear, supports_fp8
from engine.kernels.paged_attention import paged_attention
from engine.kernels.paged_step import NO_NORMS, HeadNorms
from engine.layers.attention import attend, plan_attention
from engine.layers.linear import ExactQuantLinear, GatedLinear
from engine.layers.norm import RMSNorm
from engine.layers.rope import inverse_frequencies, rotate
from tests.engine.kernels.cases import generator, paged_case, random_quant, relative_error


@pytest.mark.parametrize("rows", [16, 128, 200])
@pytest.mark.parametrize(("inputs", "group_size"), [(128, 128), (384, 64), (160, 32), (512, 512), (96, 96), (640, 128)])
def test_the_int4_layout_holds_the_same_weights(rows: int, inputs: int, group_size: int) -> None:
    quant = random_quant(rows, inputs, group_size, seed=rows)
    assert torch.equal(Int4Weight.repack(quant).dequantize(), quant.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_either_half_type_survive_beside_their_zero_point(dtype: torch.dtype) -> None:
    quant = random_quant(128, 256, 128, dtype=dtype)
    assert torch.equal(Int4Weight.repack(quant).dequantize(), quant.dequantize())


def test_int4_linear_is_the_engines_exact_layer() -> None:
    quant = random_quant(72, 320, 64, ordered=True)
    x = torch.randn(5, 320, generator=generator(1))
    bias = torch.randn(72, generator=generator(2))
    ours = int4_linear(x, Int4Weight.repack(quant), bias)
    torch.testing.assert_close(ours, ExactQuantLinear(quant, bias)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("outputs", "ordered"), [(40, False), (136, True)])
def test_a_gated_weight_gives_what_gate_and_up_give_apart(outputs: int, ordered: bool) -> None:
    quant = random_quant(2 * outputs, 320, 64, ordered=ordered)
    x = torch.randn(5, 320, generator=generator(1))
    bias = torch.randn(2 * outputs, generator=generator(2))
    weight = Int4Weight.repack(quant, is_gated=True)
    assert weight.out_features == outputs
    apart = GatedLinear(ExactQuantLinear(quant, bias))
    assert apart.out_features == outputs
    torch.testing.assert_close(int4_linear(x, weight, alternate(bias)), apart(x), rtol=1e-5, atol=1e-5)


def test_8_bit_rows_times_4_bit_weights_are_the_product_of_what_they_are_rounded_to() -> None:
    quant = random_quant(72, 384, 128, ordered=True)
    x = torch.randn(5, 384, generator=generator(1))
    bias = torch.randn(72, generator=generator(2))
    data, factors = quantize_rows(x)
    ours = int4_fp8_linear(x, Int4Weight.repack(quant), bias)
    torch.testing.assert_close(ours, ExactQuantLinear(quant, bias)(data.float() * factors), rtol=1e-5, atol=1e-5)
    # Half a step of 1/8 at most and 0.026 in the mean: of one operand, not of both.
    assert 0.015 < relative_error(ours, int4_linear(x, Int4Weight.repack(quant), bias)) < 0.04


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size", "is_supported"),
    [(72, 384, 128, True), (72, 512, 256, True), (72, 200, 200, True), (72, 384, 64, False), (36, 384, 128, False)],
)
def test_8_bit_rows_want_one_scale_a_unit_and_even_widths(
    outputs: int, inputs: int, group_size: int, is_supported: bool
) -> None:
    assert supports_fp8(Int4Weight.repack(random_quant(outputs, inputs, group_size))) is is_supported


def test_groups_without_a_layout_are_refused() -> None:
    quant = random_quant(16, 96, 24)
    assert not Int4Weight.supports(quant)
    with pytest.raises(UnsupportedQuantization, match="24"):
        Int4Weight.repack(quant)


def test_random_int4_weights_keep_the_size_of_their_inputs() -> None:
    weight = Int4Weight.random(256, 512, device="cpu", generator=generator(0))
    out = int4_linear(torch.randn(8, 512, generator=generator(1)), weight)
    assert 0.7 < float(out.std()) < 1.4


@pytest.mark.parametrize("window", [None, 7, 40])
def test_paged_attention_is_the_engines_own(window: int | None) -> None:
    lens = [(1, 33), (5, 5), (4, 50), (17, 40), (1, 1)]
    case = paged_case([q for q, _ in lens], [c for _, c in lens])
    needed = [-(-length // 16) for _, length in lens]
    tables = [row[:count] for row, count in zip(case.step.block_tables.tolist(), needed, strict=True)]
    tokens = [[0] * query for query, _ in lens]
    batch = Batch.build(tokens, [length for _, length in lens], tables, block_size=16)
    groups = plan_attention(batch, 16, frozenset({window}), torch.float32, 1)
    theirs = attend(case.q, case.kv_cache.nan_to_num(), groups, window, case.scale)
    ours = paged_attention(case.q, case.kv_cache, case.step, scale=case.scale, window=window)
    torch.testing.assert_close(ours.flatten(1), theirs, rtol=1e-5, atol=1e-5)


def test_a_padding_row_of_paged_attention_gives_zeros() -> None:
    case = paged_case([1, 1], [20, 0])
    out = torch.full_like(case.q, math.nan)
    paged_attention(case.q, case.kv_cache, case.step, scale=1.0, out=out)
    assert out[0].isfinite().all()
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_rms_norm_adds_the_residual_and_is_the_engines_own() -> None:
    x, residual = torch.randn(2, 3, 48, generator=generator(0))
    weight = torch.randn(48, generator=generator(1))
    normed, stream = rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(stream, x + residual)
    torch.testing.assert_close(normed, RMSNorm(weight, 1e-5)(x + residual))
    alone, same = rms_norm(x, weight, 1e-5)
    assert same is x
    torch.testing.assert_close(alone, RMSNorm(weight, 1e-5)(x))


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(2, 5, 24, generator=generator(0))
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), -1)), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("as_table", [False, True])
def test_rope_turns_as_the_engine_and_writes_keys_and_values(normed: bool, as_table: bool) -> None:
    heads, kv_heads, dim, block = 4, 2, 16, 8
    fused = torch.randn(5, (heads + 2 * kv_heads) * dim, generator=generator(0)).view(5, -1, dim)
    weight = torch.rand(2, dim, generator=generator(1)) + 0.5
    q, k, v = fused.clone().split([heads, kv_heads, kv_heads], dim=1)
    positions = torch.tensor([3, 9, 0, 30, 4])
    slots = torch.tensor([8, 3, -1, 30, 17])
    cache = torch.zeros(4, block, 2, kv_heads, dim)
    inv_freq, factor = inverse_frequencies(RopeConfig(theta=100.0), dim)
    cos, sin = rope_tables(torch.arange(31) if as_table else positions, inv_freq, factor)
    norms = HeadNorms(weight[0], weight[1], 1e-5) if normed else NO_NORMS
    turned = rope_and_write_kv(q, k, v, cos, sin, positions if as_table else None, slots, cache, norms)
    plain_q, plain_k, plain_v = fused.split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        plain_q, plain_k = RMSNorm(weight[0], 1e-5)(plain_q), RMSNorm(weight[1], 1e-5)(plain_k)
    angles = positions[:, None, None] * torch.cat((inv_freq, inv_freq))
    signs = torch.tensor([-1.0] * (dim // 2) + [1.0] * (dim // 2))
    expected = [rotate(x, angles.cos(), angles.sin() * signs) for x in (plain_q, plain_k)]
    torch.testing.assert_close(turned, expected[0])
    assert turned.data_ptr() == q.data_ptr()
    flat = cache.view(-1, 2, kv_heads, dim)
    written = [0, 1, 3, 4]
    torch.testing.assert_close(flat[slots[written], 0], expected[1][written])
    assert torch.equal(flat[slots[written], 1], plain_v[written])
    assert int((flat != 0).any(-1).any(-1).any(-1).sum()) == len(written)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5))
def test_rows_in_8_bits_stay_within_half_a_step(seed: int, rows: int) -> None:
    x = torch.randn(rows, 40, generator=generator(seed)) * 100
    data, scales = quantize_rows(x)
    # Three bits of mantissa: half a step is 1/16 of the value; below the smallest normal, 2**-10 of the scale.
    assert ((data.float() * scales - x).abs() <= x.abs() / 16 + scales * 2**-10).all()


def test_fp8_linear_is_near_the_unrounded_product() -> None:
    weight = torch.randn(96, 256, generator=generator(0))
    x = torch.randn(7, 256, generator=generator(1))
    packed = Fp8Weight.from_float(weight)
    assert relative_error(fp8_linear(x, packed), x @ weight.t()) < 0.06
    assert torch.equal(fp8_linear(x, packed)[2], fp8_linear(x[2:3], packed)[0])
