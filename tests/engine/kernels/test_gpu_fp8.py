"""4-bit weights times 8-bit activations on a GPU, against the rounded arithmetic in float64. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cuda_int4_fp8 import CUTS, RoundedRows, round_rows, rounded_linear
from engine.kernels.cuda_int4_many import TileCut
from engine.kernels.fp8 import FP8, quantize_rows_reference
from engine.kernels.int4 import Int4Weight, gate_alternating
from engine.kernels.int4_fp8 import int4_fp8_linear, int4_fp8_linear_reference
from engine.kernels.workspace import workspace_of
from engine.layers.linear_gpu import Fp8RowsLinear, GpuInt4Linear
from engine.load.linear import LinearFactory, LinearPart
from tests.engine.kernels.cases import generator, random_quant, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALVES = [torch.bfloat16, torch.float16]
# The result's own rounding, the matrix unit's 14 bits within a group, and 11 bits of scale * zero and of sums.
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 1.5e-3}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to("cuda", dtype)


def case(n: int, k: int, group: int = 128, *, ordered: bool = False) -> Int4Weight:
    return Int4Weight.repack(random_quant(n, k, group, seed=n + k, ordered=ordered).to("cuda"))


def in_order(rows: RoundedRows, inputs: int) -> torch.Tensor:
    """The rounded activations as the layer orders them."""
    num_rows = rows.data.shape[0]
    #                                            t  far near
    placed = rows.data.view(num_rows, -1, 4, 2, 2)
    return placed.permute(0, 1, 4, 2, 3).reshape(num_rows, -1)[:, :inputs]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 128), (5, 1000), (33, 4096), (130, 28672)])
def test_rows_are_rounded_as_by_the_reference(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = randn(rows, inputs, dtype=dtype, seed=rows) * 3
    x[0, 7] = 40.0
    made = round_rows(x)
    data, factors = (part.cuda() for part in quantize_rows_reference(x.cpu()))
    torch.testing.assert_close(made.factors[:rows], factors[:, 0], rtol=1e-6, atol=0)
    # A factor's last bit decides a tie now and then, by one step of 1/8.
    ours, theirs = in_order(made, inputs).float(), data.float()
    assert (ours != theirs).float().mean() < 1e-3
    assert ((ours - theirs).abs() <= theirs.abs() / 8 + 2**-9).all()
    units = -(-inputs // 128)
    padded = torch.nn.functional.pad(ours, (0, 128 * units - inputs)).view(rows, units, 128).sum(-1)
    sums = made.sums.permute(1, 3, 0, 2, 4).reshape(made.stride, -1)[:rows]
    torch.testing.assert_close(sums[:, :units], padded, rtol=2**-11, atol=0)
    assert not sums[:, units:].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [49, 100, 257, 1000, 2048])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.tiles}x{cut.blocks}")
@pytest.mark.parametrize(("n", "k", "group"), [(40, 1032, 128), (384, 8192, 256), (5120, 3072, 128), (264, 640, 640)])
def test_every_cut_is_the_rounded_product(
    n: int, k: int, group: int, cut: TileCut, rows: int, dtype: torch.dtype
) -> None:
    weight = case(n, k, group)
    x = randn(rows, k, dtype=dtype, seed=rows)
    bias = randn(n, dtype=dtype, seed=3) if rows % 2 else None
    rounded = round_rows(x)
    exact = _exact(rounded, weight, bias)
    first = rounded_linear(rounded, weight, bias, dtype, cut)
    assert relative_error(first, exact) < TOLERANCE[dtype]
    for _ in range(5):  # who comes first to a sum does not matter
        assert torch.equal(rounded_linear(rounded, weight, bias, dtype, cut), first)
    assert (workspace_of(x.device).parts == -1).all()


def _exact(rounded: RoundedRows, weight: Int4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    rows = rounded.data.shape[0]
    x = in_order(rounded, weight.in_features).double() * rounded.factors[:rows, None].double()
    out = x @ weight.dequantize(torch.float64).t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.tiles}x{cut.blocks}")
@pytest.mark.parametrize("rows", [50, 601])
def test_a_gate_in_every_cut(cut: TileCut, rows: int) -> None:
    weight = Int4Weight.repack(random_quant(3072, 2048, 128).to("cuda"), is_gated=True)
    x = randn(rows, 2048, dtype=torch.bfloat16)
    bias = randn(3072, dtype=torch.bfloat16, seed=3)
    rounded = round_rows(x)
    exact = gate_alternating(_exact(rounded, weight, bias))
    assert relative_error(rounded_linear(rounded, weight, bias, x.dtype, cut), exact) < 2 * TOLERANCE[x.dtype]


@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_zero_points_are_taken_off_where_activations_have_a_mean(mean: float) -> None:
    weight = case(512, 4096)
    x = randn(64, 4096, dtype=torch.bfloat16) + mean
    x[:, ::128] *= 30  # a channel of each group stands out
    rounded = round_rows(x)
    out = rounded_linear(rounded, weight, None, torch.bfloat16)
    assert relative_error(out, _exact(rounded, weight, None)) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("ordered", [False, True])
def test_the_layer_is_near_its_reference(ordered: bool) -> None:
    weight = case(256, 2048, ordered=ordered)
    x = randn(70, 2048, dtype=torch.bfloat16)
    exact = int4_fp8_linear_reference(x.double(), weight)
    assert relative_error(int4_fp8_linear(x, weight), exact) < 2 * TOLERANCE[torch.bfloat16]


def test_a_row_of_zeros_stays_one_and_a_row_is_its_own() -> None:
    weight = case(128, 1024)
    x = randn(64, 1024, dtype=torch.bfloat16)
    x[5] = 0.0
    out = int4_fp8_linear(x, weight)
    assert not out[5].any()
    x[6] *= 1000
    again = int4_fp8_linear(x, weight)
    assert torch.equal(torch.cat((out[:6], out[7:])), torch.cat((again[:6], again[7:])))


def test_within_a_captured_graph() -> None:
    weight = case(1024, 4096)
    x = randn(64, 4096, dtype=torch.bfloat16)
    int4_fp8_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = int4_fp8_linear(int4_fp8_linear(x, weight).repeat(1, 4), weight)
    for seed in range(3):
        x.copy_(randn(64, 4096, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        eager = int4_fp8_linear(int4_fp8_linear(x, weight).repeat(1, 4), weight)
        assert torch.equal(out, eager)


@pytest.mark.parametrize(("group", "kind"), [(128, Fp8RowsLinear), (64, GpuInt4Linear)])
def test_a_layer_rounds_the_activations_of_many_rows_alone(group: int, kind: type[GpuInt4Linear]) -> None:
    quant = random_quant(256, 1024, group)
    wanted, usual = (
        LinearFactory(torch.bfloat16, torch.device("cuda"), activations=activations).build([LinearPart(quant, None)])
        for activations in ("fp8", "auto")
    )
    assert type(wanted) is kind
    for rows, is_rounded in ((48, False), (49, kind is Fp8RowsLinear)):
        x = randn(rows, 1024, dtype=torch.bfloat16)
        error = relative_error(wanted(x), usual(x))
        assert (0.015 < error < 0.04) if is_rounded else error == 0.0


def test_rounded_rows_have_the_type_that_the_copy_engine_is_told() -> None:
    assert round_rows(randn(3, 256, dtype=torch.bfloat16)).data.dtype == FP8
