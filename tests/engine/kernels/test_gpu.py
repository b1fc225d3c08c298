"""Every GPU kernel against its reference in float64, on random inputs and odd shapes. Needs a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels import cuda_int4, sampling
from engine.kernels.cuda_attention_one import DecodeCut as OneCut
from engine.kernels.cuda_attention_one import attend_one_cuda
from engine.kernels.cuda_int4_many import CUTS, TileCut, many_linear, num_multiprocessors, plan_tiles
from engine.kernels.fp8 import Fp8Weight, fp8_linear, fp8_linear_reference, quantize_rows, quantize_rows_reference
from engine.kernels.fused import (
    rms_norm,
    rms_norm_reference,
    rope_and_write_kv,
    rope_and_write_kv_reference,
    rope_tables,
    silu_and_mul,
    silu_and_mul_reference,
)
from engine.kernels.int4 import Int4Weight, int4_linear, int4_linear_reference
from engine.kernels.paged_attention import paged_attention, paged_attention_reference, turn_and_attend
from engine.kernels.paged_step import NO_NORMS, HeadNorms
from engine.kernels.sampling import NOT_FINITE, SamplingTensors, sample, sample_reference
from engine.kernels.workspace import workspace_of
from tests.engine.kernels.cases import PagedCase, generator, paged_case, random_quant, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# A result rounded to nearest is off by 2**-9 (bfloat16) or 2**-12 (float16) at most, 0.4 of that in the mean square.
ROUNDING = {torch.bfloat16: 2.0e-3, torch.float16: 3e-4, torch.float32: 1e-5}
HALVES = [torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to("cuda", dtype)


def int4_case(n: int, k: int, group: int, *, ordered: bool = False, is_gated: bool = False) -> Int4Weight:
    quant = random_quant(n, k, group, seed=n + k, ordered=ordered).to("cuda")
    return Int4Weight.repack(quant, is_gated=is_gated)


def is_left_clean(device: torch.device) -> bool:
    """Whether the scratch memory is as launches want to find it."""
    workspace = workspace_of(device)
    return not workspace.counters.any() and bool((workspace.parts == -1).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 24, 32, 33, 40, 47, 48, 56, 63, 64, 65, 128, 193, 511])
@pytest.mark.parametrize(("n", "k", "group"), [(128, 128, 128), (520, 1000, 64), (384, 2048, 32), (5120, 3072, 128)])
def test_int4_linear(n: int, k: int, group: int, rows: int, dtype: torch.dtype) -> None:
    weight = int4_case(n, k, group)
    x = randn(rows, k, dtype=dtype, seed=rows)
    bias = randn(n, dtype=dtype, seed=3) if rows % 2 else None
    exact = int4_linear_reference(x.double(), weight, None if bias is None else bias.double())
    # Beyond the streaming kernel the weights themselves are rounded to halves.
    tolerance = ROUNDING[dtype] * (1.0 if rows <= cuda_int4.FEW_ROWS else 2.0)
    for _ in range(3):  # a race would not fail every time
        assert relative_error(int4_linear(x, weight, bias), exact) < tolerance
    assert is_left_clean(x.device)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 9, 17, 33, 64, 65, 100, 193, 511, 1000])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(128, 128, 128), (528, 1000, 64), (384, 2048, 32), (6144, 3072, 128), (80, 512, 128)]
)
def test_int4_linear_through_a_gate(n: int, k: int, group: int, rows: int, dtype: torch.dtype) -> None:
    weight = int4_case(n, k, group, is_gated=True)
    x = randn(rows, k, dtype=dtype, seed=rows)
    bias = randn(n, dtype=dtype, seed=3) if rows % 2 else None
    exact = int4_linear_reference(x.double(), weight, None if bias is None else bias.double())
    tolerance = ROUNDING[dtype] * (1.0 if rows <= cuda_int4.FEW_ROWS else 3.0)
    out = int4_linear(x, weight, bias)
    assert out.shape == (rows, n // 2)
    assert relative_error(out, exact) < tolerance
    assert torch.equal(int4_linear(x, weight, bias), out)
    assert is_left_clean(x.device)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.tiles}x{cut.blocks}")
def test_a_gate_in_every_cut(cut: TileCut) -> None:
    weight = int4_case(3072, 2048, 128, is_gated=True)
    for rows in (70, 600):
        x = randn(rows, 2048, dtype=torch.bfloat16, seed=rows)
        exact = int4_linear_reference(x.double(), weight)
        for splits in (False, True):
            plan = plan_tiles(cut, rows, *weight.codes.shape[:2], num_multiprocessors(0), splits=splits)
            assert relative_error(many_linear(x, weight, None, plan), exact) < 3 * ROUNDING[torch.bfloat16]


def test_products_of_several_streams_at_once() -> None:
    """Thread blocks of a launch wait for each other; those of other streams must not keep them from running."""
    weights = [int4_case(n, k, 128) for n, k in ((896, 4864), (3072, 8192), (2048, 8192), (8192, 1024))]
    inputs = [[randn(m, w.in_features, dtype=torch.bfloat16, seed=m) for m in (1, 20, 64, 100)] for w in weights]
    alone = [[int4_linear(x, w) for x in each] for w, each in zip(weights, inputs, strict=True)]
    torch.cuda.synchronize()

    def serve(weight: Int4Weight, each: list[Tensor]) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                made = [int4_linear(x, weight) for x in each]
            torch.cuda.current_stream().synchronize()
        return made

    with ThreadPoolExecutor(len(weights)) as pool:
        for made, expected in zip(pool.map(serve, weights, inputs), alone, strict=True):
            assert all(torch.equal(ours, its) for ours, its in zip(made, expected, strict=True))


@pytest.mark.parametrize("rows", [3, 20, 100])
def test_sums_that_are_not_numbers_pass_from_one_thread_block_to_another(rows: int) -> None:
    """Parts of an output wait for a bit pattern to go away; no sum may have it, whatever the activations."""
    weight = int4_case(256, 8192, 128)
    x = randn(rows, 8192, dtype=torch.bfloat16)
    x[0], x[1, 5], x[2:, 7] = torch.nan, torch.inf, -torch.nan
    x.view(torch.int16)[0, ::2] = -1  # all bits set
    assert int4_linear(x, weight).isnan()[0].all()
    assert not int4_linear(x, weight)[1:].isfinite().any()
    assert is_left_clean(x.device)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [33, 257, 2048])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut.tiles}x{cut.blocks}")
@pytest.mark.parametrize(("n", "k", "group"), [(40, 1032, 64), (384, 8192, 32), (5120, 3072, 128)])
def test_int4_linear_of_many_rows(
    n: int, k: int, group: int, cut: TileCut, splits: bool, rows: int, dtype: torch.dtype
) -> None:
    weight = int4_case(n, k, group)
    x = randn(rows, k, dtype=dtype, seed=rows)
    bias = randn(n, dtype=dtype, seed=3) if rows % 2 else None
    exact = int4_linear_reference(x.double(), weight, None if bias is None else bias.double())
    plan = plan_tiles(cut, rows, *weight.codes.shape[:2], num_multiprocessors(0), splits=splits)
    first = many_linear(x, weight, bias, plan)
    assert relative_error(first, exact) < 2 * ROUNDING[dtype]
    for _ in range(5):  # who comes first to a sum does not matter
        assert torch.equal(many_linear(x, weight, bias, plan), first)
    assert is_left_clean(x.device)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_rows_have_the_same_bits_among_as_many(group: int, dtype: torch.dtype) -> None:
    weight = int4_case(3072, 3072, group)
    x = randn(128, 3072, dtype=dtype)
    for least, most in ((1, 64), (65, 96), (97, 128)):
        whole = int4_linear(x[:most], weight)
        for rows in (least, *range(least + 7, most, 8), most - 1):
            assert torch.equal(int4_linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("blocks_per_sm", [1, 2])
@pytest.mark.parametrize(("shared_kib", "early"), [(112, False), (112, True), (220, True)])
def test_int4_rows_have_the_same_bits_in_any_batch(
    row_tiles: int, blocks_per_sm: int, shared_kib: int, early: bool
) -> None:
    weight = int4_case(4096, 4096, 128)
    config = cuda_int4.StreamConfig(row_tiles, blocks_per_sm, shared_kib, early)
    x = randn(64, 4096, dtype=torch.bfloat16)
    wholes = {most: cuda_int4.int4_linear_cuda(x[:most], weight, None, config) for most in (16, 32, 64)}
    for most, whole in wholes.items():
        assert relative_error(whole, int4_linear_reference(x[:most].double(), weight)) < ROUNDING[torch.bfloat16]
    for first, last in ((0, 1), (3, 8), (1, 12), (1, 31), (0, 20), (13, 32), (0, 33), (5, 64)):
        part = cuda_int4.int4_linear_cuda(x[first:last], weight, None, config)
        whole = next(whole for most, whole in wholes.items() if last - first <= most)
        assert torch.equal(part, whole[first:last])


def test_int4_linear_with_ordered_inputs() -> None:
    weight = int4_case(256, 512, 128, ordered=True)
    for rows in (3, 400):
        x = randn(rows, 512, dtype=torch.bfloat16)
        assert relative_error(int4_linear(x, weight), int4_linear_reference(x.double(), weight)) < 4e-3


@pytest.mark.parametrize(("rows", "n", "k"), [(5, 40, 100), (5, 40, 512), (70, 36, 512), (0, 40, 512)])
def test_int4_linear_in_what_the_kernels_do_not_take(rows: int, n: int, k: int) -> None:
    weight = int4_case(n, k, k if k == 100 else 128)
    dtype = torch.float32 if n == 40 and k == 512 else torch.bfloat16
    x = randn(rows, k, dtype=dtype)
    if rows == 0:
        assert int4_linear(x, weight).shape == (0, n)
        return
    assert relative_error(int4_linear(x, weight), int4_linear_reference(x.double(), weight)) < 4e-3


def test_repacking_on_the_device_is_repacking_on_the_host() -> None:
    quant = random_quant(300, 640, 64)
    there, here = Int4Weight.repack(quant.to("cuda")), Int4Weight.repack(quant)
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.scales.cpu(), here.scales)


def test_int4_linear_within_a_captured_graph() -> None:
    weight, dtype = int4_case(1024, 4096, 128), torch.bfloat16
    x = randn(4, 4096, dtype=dtype)
    int4_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = int4_linear(int4_linear(x, weight).repeat(1, 4), weight)
    for seed in range(3):
        x.copy_(randn(4, 4096, dtype=dtype, seed=seed))
        graph.replay()
        first = int4_linear_reference(x, weight).repeat(1, 4)
        assert relative_error(out, int4_linear_reference(first.double(), weight)) < 2 * ROUNDING[dtype]


def attend(case: PagedCase, window: int | None) -> Tensor:
    return paged_attention(
        case.q,
        case.kv_cache,
        case.step,
        scale=case.scale,
        window=window,
        out=torch.full_like(case.q, math.nan),
    )


ATTENTION_CASES: dict[str, tuple[list[int], list[int]]] = {
    "one decode": ([1], [700]),
    "decodes": ([1] * 6, [1, 15, 16, 17, 500, 3000]),
    "padded decodes": ([1] * 4, [40, 0, 7, 0]),
    "checks": ([5] * 5, [5, 6, 64, 900, 33]),
    "prefill": ([200, 65, 1], [200, 65, 1]),
    "mixed": ([1, 130, 1, 17, 5], [300, 400, 1, 17, 1025]),
    "chunks": ([300, 0, 1, 700], [2500, 0, 0, 700]),
}


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("name", ATTENTION_CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(32, 8, 128, 16), (24, 8, 128, 16), (6, 2, 80, 8), (14, 2, 64, 32), (40, 1, 128, 8)],
)
def test_paged_attention(
    heads: int, kv_heads: int, dim: int, block: int, name: str, window: int | None, dtype: torch.dtype
) -> None:
    query_lens, context_lens = ATTENTION_CASES[name]
    case = paged_case(
        query_lens, context_lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block
    ).to("cuda", dtype)
    wide = case.to("cuda", torch.float64)
    exact = paged_attention_reference(wide.q, wide.kv_cache, wide.step, scale=wide.scale, window=window)
    # Probabilities are rounded to the values' dtype before the second product.
    assert relative_error(attend(case, window), exact) < 2 * ROUNDING[dtype]


def test_attention_of_prompts_leaves_its_claims_at_zero_and_other_blocks_alone() -> None:
    case = paged_case([700, 90], [1500, 90], num_heads=32, num_kv_heads=8, head_dim=128).to("cuda", torch.bfloat16)
    first = attend(case, None)
    # The same pool within a larger one whose blocks lie apart, as in an arena: only strides and places differ.
    apart = torch.full((len(case.kv_cache), 3, *case.kv_cache.shape[1:]), math.nan, dtype=torch.bfloat16, device="cuda")
    apart[:, 1] = case.kv_cache
    case.kv_cache = apart[:, 1]
    for _ in range(5):  # who takes which piece of work differs from time to time
        assert torch.equal(attend(case, None), first)
        assert not workspace_of(case.q.device).counters.any()


@dataclass
class DecodeCase:
    """A step of one token a sequence as its projections leave it, and what it must come to."""

    paged: PagedCase
    heads: Tensor  # queries, keys and values side by side
    tables: tuple[Tensor, Tensor]
    norms: HeadNorms
    window: int | None
    exact: Tensor
    exact_cache: Tensor

    @classmethod
    def of(
        cls, paged: PagedCase, dtype: torch.dtype, *, normed: bool = False, window: int | None = None, seed: int = 0
    ) -> DecodeCase:
        paged = paged.to("cuda", dtype)
        (count, num_heads, dim), num_kv_heads = paged.q.shape, paged.kv_cache.shape[3]
        block_size = paged.kv_cache.shape[1]
        heads = randn(count, num_heads + 2 * num_kv_heads, dim, dtype=dtype, seed=seed)
        last = (paged.step.context_lens - 1).long()
        block = paged.step.block_tables.gather(1, last.clamp_min(0)[:, None] // block_size).squeeze(1)
        slots = torch.where(last < 0, -1, block * block_size + last % block_size)
        tables = rope_tables(last, torch.rand(dim // 2, generator=generator(2)).cuda())
        paged.step = replace(paged.step, slots=slots)
        norms = HeadNorms(eps=1e-5)
        if normed:
            norms = HeadNorms(randn(dim, dtype=dtype, seed=5), randn(dim, dtype=dtype, seed=6), 1e-5)
        # What earlier steps left where this one's key and value go must not matter.
        paged.kv_cache.flatten(0, 1)[slots[slots >= 0]] = 3e4
        cache = paged.kv_cache.clone()
        q, k, v = heads.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q = rope_and_write_kv_reference(q, k, v, *tables, None, slots, cache, norms)
        exact = paged_attention_reference(q.double(), cache.double(), paged.step, scale=paged.scale, window=window)
        return cls(paged, heads, tables, norms, window, exact, cache)

    def run(self, cut: OneCut | None = None) -> tuple[Tensor, Tensor]:
        """What the kernels give, and their cache."""
        paged, cache = self.paged, self.paged.kv_cache.clone()
        num_heads, num_kv_heads = paged.q.shape[1], cache.shape[3]
        q, k, v = self.heads.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        torch.cuda.synchronize()  # what came before this step has ended
        given = (q, k, v, *self.tables, cache, paged.step)
        if cut is not None:
            return attend_one_cuda(*given, paged.scale, self.window, self.norms, cut), cache
        return turn_and_attend(*given, scale=paged.scale, window=self.window, norms=self.norms), cache


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [
        (32, 8, 128, 16),
        (24, 8, 128, 16),
        (16, 2, 128, 32),
        (14, 2, 64, 8),
        (3, 3, 64, 128),
        (6, 2, 80, 8),
        (40, 1, 128, 8),
    ],
)
def test_turn_and_attend(
    heads: int, kv_heads: int, dim: int, block: int, normed: bool, window: int | None, dtype: torch.dtype
) -> None:
    lengths = [1, 15, 0, 16, 17, 129, 0, 255, 256, 257, 500, 3000]
    paged = paged_case(
        [1] * len(lengths), lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block
    )
    case = DecodeCase.of(paged, dtype, normed=normed, window=window)
    out, cache = case.run()
    assert relative_error(out, case.exact) < 2 * ROUNDING[dtype]
    for row in range(len(lengths)):
        if lengths[row]:
            assert relative_error(out[row], case.exact[row]) < 3 * ROUNDING[dtype]
    torch.testing.assert_close(cache, case.exact_cache, equal_nan=True)


@pytest.mark.parametrize("cut", [OneCut(warps, least, 8) for warps in (4, 8) for least in (1, 3, 16)])
@pytest.mark.parametrize("lengths", [[2500], [1, 40, 0, 4000, 700]])
@pytest.mark.parametrize("heads", [24, 64])
def test_a_decode_cut_into_many_parts_has_the_same_bits_every_time(heads: int, lengths: list[int], cut: OneCut) -> None:
    paged = paged_case([1] * len(lengths), lengths, num_heads=heads, num_kv_heads=8, head_dim=128)
    case = DecodeCase.of(paged, torch.bfloat16)
    first, cache = case.run(cut)
    assert relative_error(first, case.exact) < 2 * ROUNDING[torch.bfloat16]
    torch.testing.assert_close(cache, case.exact_cache, equal_nan=True)
    for _ in range(10):  # who comes last does not matter
        assert torch.equal(case.run(cut)[0], first)
    assert not workspace_of(first.device).counters.any()


def test_a_captured_decode_holds_for_other_lengths() -> None:
    dtype, lengths = torch.bfloat16, [3000, 1, 700, 0]
    longest = paged_case([1] * 4, [3000] * 4, num_heads=24, num_kv_heads=8, head_dim=128)
    case = DecodeCase.of(longest, dtype)
    static, cache = case.paged, case.paged.kv_cache
    q, k, v = (part.clone() for part in case.heads.split([24, 8, 8], dim=1))
    cos, sin = (table.clone() for table in case.tables)

    def step() -> Tensor:
        again = (q.clone(), k.clone(), v.clone())  # ordinary kernels, as a step begins with
        return turn_and_attend(*again, cos, sin, cache, static.step, scale=static.scale, window=None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed, lens in enumerate((lengths, lengths[::-1], [17, 900, 16, 2999])):
        paged = paged_case([1] * 4, [3000] * 4, num_heads=24, num_kv_heads=8, head_dim=128, seed=seed)
        paged.step = replace(paged.step, context_lens=torch.tensor(lens, dtype=torch.int32))
        fresh = DecodeCase.of(paged, dtype, seed=seed)
        for held, other in zip((q, k, v), fresh.heads.split([24, 8, 8], dim=1), strict=True):
            held.copy_(other)
        cos.copy_(fresh.tables[0])
        sin.copy_(fresh.tables[1])
        cache.copy_(fresh.paged.kv_cache)
        static.step.slots.copy_(fresh.paged.step.slots)
        static.step.block_tables.copy_(fresh.paged.step.block_tables)
        static.step.context_lens.copy_(fresh.paged.step.context_lens)
        graph.replay()
        assert relative_error(out, fresh.exact) < 2 * ROUNDING[dtype]
        torch.testing.assert_close(cache, fresh.exact_cache, equal_nan=True)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("width", [64, 3072, 5000, 8192])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, width, dtype=dtype), randn(5, width, dtype=dtype, seed=1), randn(width, dtype=dtype)
    for added in (None, residual):
        normed, stream = rms_norm(x, weight, 1e-5, added)
        exact, exact_stream = rms_norm_reference(x, weight, 1e-5, added)
        assert torch.equal(stream, exact_stream)
        assert relative_error(normed, rms_norm_reference(exact_stream.double(), weight, 1e-5)[0]) < ROUNDING[dtype]
        torch.testing.assert_close(normed, exact)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("width", [24, 1300, 14336])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    gate_up = randn(5, 2 * width, dtype=dtype)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("as_table", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 80), (24, 8, 128)])
def test_rope_and_kv_write(
    heads: int, kv_heads: int, dim: int, as_table: bool, normed: bool, dtype: torch.dtype
) -> None:
    fused = randn(5, heads + 2 * kv_heads, dim, dtype=dtype)
    weight = randn(2, dim, dtype=dtype, seed=1)
    positions = torch.tensor([3, 9, 0, 30, 4], device="cuda")
    slots = torch.tensor([8, 3, -1, 30, 17], device="cuda")
    inv_freq = torch.rand(dim // 2, generator=generator(2)).cuda()
    cos, sin = rope_tables(torch.arange(31, device="cuda") if as_table else positions, inv_freq)
    results = []
    function: Callable[..., Tensor]
    for function in (rope_and_write_kv, rope_and_write_kv_reference):
        q, k, v = fused.clone().split([heads, kv_heads, kv_heads], dim=1)
        cache = torch.zeros(4, 8, 2, kv_heads, dim, dtype=dtype, device="cuda")
        norms = HeadNorms(weight[0], weight[1], 1e-5) if normed else NO_NORMS
        results.append((function(q, k, v, cos, sin, positions if as_table else None, slots, cache, norms), cache))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [128, 3072, 5000])
def test_rounding_rows_to_8_bits(width: int, dtype: torch.dtype) -> None:
    x = randn(9, width, dtype=dtype)
    x[4] = 0
    data, scales = quantize_rows(x)
    exact, exact_scales = quantize_rows_reference(x)
    torch.testing.assert_close(scales, exact_scales)
    # A quotient that lies on a tie may fall to either side.
    assert (data.float() != exact.float()).float().mean() < 1e-3
    assert relative_error((data.float() * scales)[:4], x[:4]) < 0.03


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_fp8_linear(rows: int) -> None:
    weight = Fp8Weight.from_float(randn(512, 1024, dtype=torch.bfloat16))
    x = randn(rows, 1024, dtype=torch.bfloat16, seed=1)
    bias = randn(512, dtype=torch.bfloat16, seed=2)
    exact = fp8_linear_reference(x.float(), weight, bias.float())
    assert relative_error(fp8_linear(x, weight, bias), exact) < 4e-3


def sampling_case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, SamplingTensors]:
    logits = (torch.randn(rows, vocab, generator=generator(0)) * 3).to("cuda", dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.9], device="cuda").repeat(rows // 4 + 1)[:rows]
    seeds = torch.arange(rows, device="cuda") * 1000003
    return logits, SamplingTensors(temperature, seeds, torch.arange(rows, device="cuda") + 5)


@pytest.mark.parametrize("vocab", [300, 32000, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filtered", [False, True])
def test_sampling_draws_the_references_tokens(vocab: int, dtype: torch.dtype, filtered: bool) -> None:
    logits, params = sampling_case(64, vocab, dtype)
    if filtered:
        params.top_p = torch.tensor([0.8, 0.5, 1.0, 0.95], device="cuda").repeat_interleave(16)
        params.top_k = torch.tensor([40, 0, 7, 0, 1, 0, 100000, 0], device="cuda").repeat(8)
        params.min_p = torch.tensor([0.0, 0.0, 0.05], device="cuda").repeat(22)[:64].contiguous()
    ours, exact = sample(logits, params, 5), sample_reference(logits, params, 5)
    assert (ours.token_ids != exact.token_ids).sum() <= 1  # a draw may fall within rounding of a boundary
    greedy = sample(logits, SamplingTensors())
    assert torch.equal(greedy.token_ids, logits.float().argmax(-1))
    assert torch.equal(greedy.token_ids[::4], ours.token_ids[::4])
    assert not ours.errors.any()


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 2.5, -math.inf, 0.5] * 1500).cuda()
    logits[7:] = -math.inf
    rows = 20000
    params = SamplingTensors(
        temperature=torch.full((rows,), 0.8, device="cuda"),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.full((rows,), 9, device="cuda"),
    )
    drawn = sample(logits.expand(rows, -1).contiguous(), params).token_ids
    seen = torch.bincount(drawn, minlength=9)[:9].double() / rows
    expected = (logits[:9].double() / 0.8).softmax(-1)
    assert drawn.max() < 9
    assert (seen - expected).abs().max() < 4 * 0.5 / math.sqrt(rows)


def test_a_bad_row_is_told_and_the_others_stand() -> None:
    logits, params = sampling_case(8, 9000, torch.float32)
    whole = sample(logits, params).token_ids
    logits[2, 8000] = math.nan
    logits[5, 1] = math.inf
    sampled = sample(logits, params)
    assert sampled.errors.tolist() == [0, 0, NOT_FINITE, 0, 0, NOT_FINITE, 0, 0]
    kept = [0, 1, 3, 4, 6, 7]
    assert torch.equal(sampled.token_ids[kept], whole[kept])
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < 9000)).all()


def test_a_step_of_sampling_can_be_captured() -> None:
    logits, params = sampling_case(8, 32000, torch.float32)
    params.top_p = torch.full((8,), 0.8, device="cuda")
    sampling.sample(logits, params, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampling.sample(logits, params, 3)
    logits.copy_(logits.flip(1).clone())
    graph.replay()
    assert torch.equal(captured.token_ids, sampling.sample(logits, params, 3).token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [33, 4096, 128_256, 151_936 - 7])
def test_masking_logits(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab, device="cuda").to(dtype)
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), device="cuda").to(torch.int32)
    masks[2] = -1
    expected = logits.cpu()
    sampling.mask_logits(expected, masks.cpu())
    sampling.mask_logits(logits, masks)
    assert torch.equal(logits.cpu(), expected)
    assert torch.isfinite(logits[2]).all()
