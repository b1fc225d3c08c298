"""``python -m engine.bench.kernels``: every GPU kernel against its floor, at the shapes of 3B, 8B and 70B Llamas.

Times are of graph replays over several copies of the weights (more than the L2 cache holds), so neither launches nor
cache hits are in them. A floor is the larger of bytes over the measured read bandwidth and operations over the measured
rate of the matrix units; both ceilings are measured first, in the same process.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.card import machine_card
from engine.kernels.fp8 import Fp8Weight, fp8_linear, quantize_rows
from engine.kernels.fused import rms_norm, rope_and_write_kv, rope_tables, silu_and_mul
from engine.kernels.int4 import Int4Weight, int4_linear
from engine.kernels.paged_attention import paged_attention
from engine.kernels.sampling import SamplingTensors, sample

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
CACHE_BYTES = 192 << 20  # of distinct weights that one timing walks through: three times an H200's L2
INT4_BYTES = 0.53125  # a weight of groups of 128: a nibble, and four bytes a group
BLOCK_SIZE = 16
WARM_S = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Llama's layer is made of."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    head_dim: int = 128
    vocab: int = 128256

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's four."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden),
            "o": (self.hidden, self.num_heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SHAPES = (
    Shape("3b", 3072, 8192, 24, 8, 28),
    Shape("8b", 4096, 14336, 32, 8, 32),
    Shape("70b", 8192, 28672, 64, 8, 80),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of this GPU: bytes per second read, bf16 and fp8 operations per second."""

    read: float
    bf16: float
    fp8: float

    def floor_us(self, num_bytes: float, operations: float = 0.0) -> float:
        return 1e6 * max(num_bytes / self.read, operations / self.bf16)


@dataclass(frozen=True, slots=True)
class Line:
    """One timing."""

    model: str
    kernel: str
    rows: int
    us: float
    floor_us: float
    note: str = ""


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds per call of ``calls`` made one after the other in a replayed graph; the median of ``repeats``."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        rounds = max(1, 24 // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        # A card that idled, or ran something heavier, takes some milliseconds to settle its clocks.
        warm_until_s = time.perf_counter() + WARM_S
        while time.perf_counter() < warm_until_s:
            graph.replay()
            stream.synchronize()
        times: list[float] = []
        for _ in range(repeats):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record(stream)
            graph.replay()
            ended.record(stream)
            ended.synchronize()
            times.append(1e3 * began.elapsed_time(ended) / (rounds * len(calls)))
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Reading 4 GiB by a maximum over rows, and square products of 8192."""
    read = _read_bandwidth()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    operations = 2.0 * 8192**3
    bf16 = operations / time_us([lambda: a @ b]) * 1e6
    weight = Fp8Weight.from_float(b)
    rows, scales = quantize_rows(a)

    def multiply_fp8() -> Tensor:
        out: Tensor = torch._scaled_mm(
            rows, weight.data.t(), scale_a=scales, scale_b=weight.scales[None, :], out_dtype=torch.bfloat16
        )
        return out

    return Ceilings(read, bf16, operations / time_us([multiply_fp8]) * 1e6)


def _read_bandwidth() -> float:
    data = torch.randint(0, 255, (8192, 1 << 19), dtype=torch.uint8, device="cuda").view(torch.int64)
    num_bytes = float(data.nbytes)
    return 1e6 * num_bytes / time_us([partial(data.amax, dim=1)])


def copies_of(num_bytes: float) -> int:
    return max(2, math.ceil(CACHE_BYTES / num_bytes))


def bench_linears(shape: Shape, ceilings: Ceilings, rows: tuple[int, ...]) -> Iterator[Line]:
    """INT4 matrices of a layer, and bfloat16 ones through the library for comparison."""
    for name, (n, k) in shape.matrices.items():
        num_bytes = INT4_BYTES * n * k
        weights = [Int4Weight.random(n, k, device="cuda") for _ in range(copies_of(num_bytes))]
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            us = time_us([partial(int4_linear, x, w) for w in weights])
            yield Line(shape.name, name, m, us, ceilings.floor_us(num_bytes + 2 * m * (n + k), 2.0 * m * n * k))


def bench_dense(shape: Shape, ceilings: Ceilings, rows: tuple[int, ...]) -> Iterator[Line]:
    """The head in bfloat16, and one projection in FP8."""
    head = [torch.randn(shape.vocab, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for m in rows:
        if m > 512:
            continue
        x = torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16)
        us = time_us([partial(F.linear, x, w) for w in head])
        yield Line(shape.name, "lm_head", m, us, ceilings.floor_us(head[0].nbytes, 2.0 * m * head[0].numel()))
    del head
    n, k = shape.matrices["gate_up"]
    weights = [Fp8Weight.from_float(torch.randn(n, k, device="cuda")) for _ in range(copies_of(n * k))]
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        us = time_us([partial(fp8_linear, x, w) for w in weights])
        floor = 1e6 * max(n * k / ceilings.read, 2.0 * m * n * k / ceilings.fp8)
        yield Line(shape.name, "gate_up fp8", m, us, floor)


def attention_case(shape: Shape, size: int, query_len: int, context: int) -> tuple[Tensor, ...]:
    """Queries, pool, several block tables (copies, size, blocks), lengths, query starts."""
    blocks_each = context // BLOCK_SIZE
    copies = min(copies_of(4 * size * context * shape.num_kv_heads * shape.head_dim), 64)
    pool = (copies * size * blocks_each, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim)
    kv = torch.randn(pool, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(pool[0], device="cuda").view(copies, size, blocks_each).to(torch.int32)
    lens = torch.full((size,), context, dtype=torch.int32, device="cuda")
    starts = (torch.arange(size + 1, device="cuda") * query_len).to(torch.int32)
    q = torch.randn(size * query_len, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    return q, kv, tables, lens, starts


def bench_attention(shape: Shape, ceilings: Ceilings) -> Iterator[Line]:
    """Decodes of several batch sizes and contexts, a verification of five, and a prefill chunk."""
    cases = [(b, 1, c) for b in (1, 8, 32, 128) for c in (512, 1024, 8192) if b * c <= 1 << 18]
    cases += [(1, 5, 1024), (8, 5, 1024), (1, 512, 512), (1, 2048, 2048), (1, 512, 8192)]
    for size, query_len, context in cases:
        q, kv, tables, lens, starts = attention_case(shape, size, query_len, context)
        num_bytes = 4 * size * context * shape.num_kv_heads * shape.head_dim
        attend = partial(
            paged_attention,
            q,
            kv,
            context_lens=lens,
            query_starts=starts,
            scale=0.09,
            max_query_len=query_len,
        )
        us = time_us([partial(attend, table) for table in tables])
        seen = context - (query_len - 1) / 2  # keys a query sees on average
        operations = 4.0 * size * query_len * seen * shape.num_heads * shape.head_dim
        note = f"{size} x {query_len} queries, context {context}"
        yield Line(shape.name, "attention", size * query_len, us, ceilings.floor_us(num_bytes, operations), note)


def bench_fused(shape: Shape, ceilings: Ceilings, rows: tuple[int, ...]) -> Iterator[Line]:
    """What lies between the matrices. These read what the kernel before wrote, so their floor is one launch."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    weight = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    for m in rows:
        x, residual = (torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield Line(
            shape.name,
            "rms_norm",
            m,
            time_us([partial(rms_norm, x, weight, 1e-5, residual)]),
            ceilings.floor_us(8 * m * shape.hidden),
        )
        gate_up = torch.randn(m, 2 * shape.intermediate, device="cuda", dtype=torch.bfloat16)
        yield Line(
            shape.name,
            "silu_and_mul",
            m,
            time_us([partial(silu_and_mul, gate_up)]),
            ceilings.floor_us(6 * m * shape.intermediate),
        )
        qkv = torch.randn(m, heads + 2 * kv_heads, dim, device="cuda", dtype=torch.bfloat16)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        slots = torch.arange(m, device="cuda")
        cache = torch.zeros(m // BLOCK_SIZE + 1, BLOCK_SIZE, 2, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
        cos, sin = rope_tables(slots, torch.rand(dim // 2, device="cuda"))

        turn = partial(rope_and_write_kv, q, k, v, cos, sin, None, slots, cache)
        yield Line(shape.name, "rope_and_write_kv", m, time_us([turn]), ceilings.floor_us(2.0 * qkv.nbytes))


def bench_sampling(shape: Shape, ceilings: Ceilings) -> Iterator[Line]:
    """Greedy, drawn, and drawn with ``top_p``."""
    for m in (1, 8, 32, 128):
        logits = torch.randn(m, shape.vocab, device="cuda") * 3
        seeds = torch.arange(m, device="cuda")
        ones = torch.ones(m, device="cuda")
        drawn = SamplingTensors(temperature=ones, seeds=seeds, positions=seeds)
        filtered = replace(drawn, top_p=ones * 0.9)
        for name, params in (("greedy", SamplingTensors()), ("draw", drawn), ("draw top_p", filtered)):
            us = time_us([partial(sample, logits, params)])
            yield Line(shape.name, name, m, us, ceilings.floor_us(logits.nbytes))


def sweep(shape: Shape, rows: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Every cut of the streaming INT4 kernel: what the defaults of ``StreamConfig`` were chosen by."""
    from engine.kernels.cuda_int4 import StreamConfig, dequantized_linear, int4_linear_cuda

    for name, (n, k) in shape.matrices.items():
        weights = [Int4Weight.random(n, k, device="cuda") for _ in range(copies_of(INT4_BYTES * n * k))]
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            line: dict[str, object] = {"model": shape.name, "kernel": name, "rows": m}
            if m <= 512:
                for tiles, per_sm, kib in ((1, 2, 112), (2, 2, 112), (2, 1, 112), (2, 1, 220)):
                    config = StreamConfig(tiles, per_sm, kib)
                    key = f"t{tiles}b{per_sm}s{kib}"
                    line[key] = round(
                        time_us([partial(int4_linear_cuda, x, w, None, config) for w in weights]),
                        1,
                    )
            if m >= 64:
                for mib in (64, 2048):
                    line[f"dequant{mib}"] = round(
                        time_us([partial(dequantized_linear, x, w, None, mib << 20) for w in weights]),
                        1,
                    )
            yield line


def sweep_attention(shape: Shape) -> Iterator[dict[str, object]]:
    """Cuts of the attention kernel, to choose :func:`engine.kernels.triton_attention.choose_config` by."""
    from engine.kernels.triton_attention import AttentionConfig, paged_attention_triton

    group = shape.num_heads // shape.num_kv_heads
    cases = [(1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (32, 1, 8192), (128, 1, 1024), (1, 512, 512), (1, 2048, 2048)]
    for size, query_len, context in cases:
        q, kv, tables, lens, starts = attention_case(shape, size, query_len, context)
        line: dict[str, object] = {"model": shape.name, "size": size, "query_len": query_len, "context": context}
        if query_len == 1:
            wide = max(1, 132 // (size * shape.num_kv_heads))
            cuts = [
                AttentionConfig(16, tile, splits, warps, stages)
                for splits in sorted({min(32, max(1, wide * f)) for f in (1, 2, 4)})
                for tile, warps, stages in (
                    (32, 4, 4),
                    (64, 4, 3),
                    (64, 4, 4),
                    (64, 2, 3),
                    (128, 4, 2),
                    (128, 4, 3),
                    (128, 8, 3),
                )
            ]
        else:
            cuts = [
                AttentionConfig(rows, tile, 1, warps, stages)
                for rows, tile, warps, stages in (
                    (64, 64, 4, 2),
                    (64, 64, 4, 3),
                    (64, 128, 4, 2),
                    (128, 64, 4, 3),
                    (128, 64, 8, 2),
                    (128, 64, 8, 3),
                    (128, 128, 8, 2),
                    (128, 128, 8, 3),
                )
                if rows >= group
            ]
        for cut in cuts:
            calls = [
                partial(paged_attention_triton, q, kv, table, lens, starts, 0.09, None, query_len, None, cut)
                for table in tables
            ]
            key = f"r{cut.rows}t{cut.tile}s{cut.splits}w{cut.num_warps}p{cut.num_stages}"
            try:
                line[key] = round(time_us(calls, 3), 1)
            except Exception as error:  # a cut that does not fit the chip
                line[key] = type(error).__name__
        yield line


def print_table(lines: list[Line]) -> None:
    """Microseconds over floor, a line per kernel and model, a column per row count."""
    by_kernel: dict[tuple[str, str], dict[int, Line]] = {}
    for line in lines:
        by_kernel.setdefault((line.model, line.kernel if not line.note else f"{line.kernel}: {line.note}"), {})[
            line.rows
        ] = line
    for (model, kernel), cells in by_kernel.items():
        text = "  ".join(f"{rows}: {line.us:.1f}/{line.floor_us:.1f}" for rows, line in sorted(cells.items()))
        print(f"{model:4} {kernel:18} {text}")


def layer_estimates(lines: list[Line]) -> Iterator[dict[str, object]]:
    """Sum of a layer's four matrices over their floors, and of all layers in milliseconds."""
    for shape in SHAPES:
        own = [line for line in lines if line.model == shape.name and line.kernel in shape.matrices]
        for rows in sorted({line.rows for line in own}):
            us = sum(line.us for line in own if line.rows == rows)
            floor = sum(line.floor_us for line in own if line.rows == rows)
            yield {
                "model": shape.name,
                "rows": rows,
                "layer_us": round(us, 1),
                "layer_floor_us": round(floor, 1),
                "of_floor": round(floor / us, 3),
                "all_layers_ms": round(us * shape.num_layers / 1e3, 3),
            }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.kernels", description=__doc__)
    parser.add_argument("--models", default="3b,8b,70b", help="which shapes")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="row counts of the matrices")
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    parser.add_argument("--sweep", action="store_true", help="try every cut of the INT4 kernel instead")
    parser.add_argument("--attention", action="store_true", help="with --sweep: the attention kernel's cuts too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "The kernels' bench needs a CUDA device.\n")
    rows = tuple(int(part) for part in options.rows.split(","))
    shapes = [shape for shape in SHAPES if shape.name in options.models.split(",")]
    ceilings = measure_ceilings()
    records: list[dict[str, object]] = [{"card": machine_card()}, {"ceilings": asdict(ceilings)}]
    print(
        f"read {ceilings.read / 1e12:.2f} TB/s, bf16 {ceilings.bf16 / 1e12:.0f}, fp8 {ceilings.fp8 / 1e12:.0f} TFLOP/s"
    )
    if options.sweep:
        for shape in shapes:
            for record in chain(sweep(shape, rows), sweep_attention(shape) if options.attention else ()):
                records.append(record)
                print(json.dumps(record), flush=True)
    else:
        lines: list[Line] = []
        for shape in shapes:
            small = tuple(m for m in rows if m in (1, 8, 32, 128, 2048))
            lines += [
                *bench_linears(shape, ceilings, rows),
                *bench_dense(shape, ceilings, small),
                *bench_attention(shape, ceilings),
                *bench_fused(shape, ceilings, small),
                *bench_sampling(shape, ceilings),
            ]
        print_table(lines)
        for estimate in layer_estimates(lines):
            records.append(estimate)
            print(json.dumps(estimate))
        records += [asdict(line) for line in lines]
    if options.out is not None:
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(sys.argv[1:])
