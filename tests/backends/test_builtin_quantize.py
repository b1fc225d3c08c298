"""The two 4-bit layouts: packed and unpacked alike, field by field, and trained through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.builtin.quantize import Layout, fake_quantize, pack, to_levels, unpack

LAYOUTS: tuple[Layout, ...] = ("gptq", "awq")


def _weight(seed: int, num_out: int = 24, num_in: int = 128) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed)) * 0.1


@given(st.integers(0, 2**31), st.sampled_from(LAYOUTS), st.sampled_from([32, 64, 128]))
def test_unpacked_is_what_was_trained(seed: int, layout: Layout, group_size: int) -> None:
    weight = _weight(seed)
    assert torch.equal(unpack(pack(weight, group_size, layout), layout), fake_quantize(weight, group_size, layout))


@given(st.integers(0, 2**31), st.sampled_from(LAYOUTS))
def test_rounding_stays_within_half_a_step(seed: int, layout: Layout) -> None:
    weight = _weight(seed)
    _, _, scales = to_levels(weight, 64, layout)
    error = (fake_quantize(weight, 64, layout) - weight).abs().view(24, 2, 64)
    # The zero point is rounded too, so the ends of an asymmetric group may be clipped by another half step.
    assert bool((error <= scales * (0.51 if layout == "gptq" else 1.01)).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantising_twice_changes_nothing(layout: Layout) -> None:
    once = fake_quantize(_weight(3), 64, layout)
    assert torch.allclose(fake_quantize(once, 64, layout), once, atol=1e-4)


def test_awq_words_follow_the_gemm_order() -> None:
    weight = _weight(1, num_out=8, num_in=64)
    levels, zeros, _ = to_levels(weight, 64, "awq")
    packed = pack(weight, 64, "awq")
    assert packed["qweight"].shape == (64, 1)
    assert packed["qzeros"].shape == (1, 1)
    assert packed["scales"].shape == (1, 8)
    for row in (0, 17, 63):
        word = int(packed["qweight"][row, 0]) & 0xFFFFFFFF
        nibbles = [(word >> (4 * i)) & 15 for i in range(8)]
        assert nibbles == [int(levels[out, 0, row]) for out in (0, 2, 4, 6, 1, 3, 5, 7)]
    word = int(packed["qzeros"][0, 0]) & 0xFFFFFFFF
    assert [(word >> (4 * i)) & 15 for i in range(8)] == [int(zeros[out, 0, 0]) for out in (0, 2, 4, 6, 1, 3, 5, 7)]


def test_gptq_words_hold_consecutive_inputs_and_zeros_less_one() -> None:
    weight = _weight(2, num_out=8, num_in=64)
    levels, _, _ = to_levels(weight, 64, "gptq")
    packed = pack(weight, 64, "gptq")
    assert packed["qweight"].shape == (8, 8)
    for word_row, out in ((0, 0), (3, 5), (7, 7)):
        word = int(packed["qweight"][word_row, out]) & 0xFFFFFFFF
        expected = [int(levels[out, 0, 8 * word_row + i]) for i in range(8)]
        assert [(word >> (4 * i)) & 15 for i in range(8)] == expected
    assert int(packed["qzeros"][0, 0]) & 0xFFFFFFFF == 0x77777777
    assert packed["g_idx"].tolist() == [0] * 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_pass_straight_through(layout: Layout) -> None:
    weight = _weight(5).requires_grad_()
    slope = torch.randn(24, 128)
    (fake_quantize(weight, 64, layout) * slope).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.equal(weight.grad, slope)


def test_a_group_of_zeros_stays_zero() -> None:
    for layout in LAYOUTS:
        assert not fake_quantize(torch.zeros(8, 64), 64, layout).any()
