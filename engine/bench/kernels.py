"""Runs ``python -m engine.bench.kernels``: every GPU kernel against its floor, at the shapes of 3B, 8B and 70B Llamas.

Times are of graph replays over several copies of the weights (more than the L2 cache holds), so neither launches nor
cache hits are in them. A floor is the larger of bytes over the measured read bandwidth and operations over the measured
rate of the matrix units; both ceilings are measured first, in the same process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.bench.kernel_cases import (
    BLOCK_SIZE,
    INT4_BYTES,
    SHAPES,
    KernelCeilings,
    KernelTiming,
    LayerShape,
    attention_case,
    copies_of,
    measure_ceilings,
    time_us,
)
from engine.bench.kernel_sweeps import SWEEPS
from engine.bench.machine_card import machine_card
from engine.kernels.fp8 import Fp8Weight, fp8_linear
from engine.kernels.fused import rms_norm, rope_and_write_kv, rope_tables, silu_and_mul
from engine.kernels.int4 import Int4Weight, int4_linear
from engine.kernels.paged_attention import paged_attention
from engine.kernels.sampling import SamplingTensors, sample

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)


def bench_linears(shape: LayerShape, ceilings: KernelCeilings, rows: tuple[int, ...]) -> Iterator[KernelTiming]:
    """Time a layer's INT4 matrices, and bfloat16 ones through the library for comparison."""
    for name, (n, k) in shape.matrices.items():
        num_bytes = INT4_BYTES * n * k
        is_gated = name == "gate_up"
        weights = [Int4Weight.random(n, k, is_gated=is_gated, device="cuda") for _ in range(copies_of(num_bytes))]
        outputs = weights[0].out_features
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            us = time_us([partial(int4_linear, x, w) for w in weights])
            yield KernelTiming(
                shape.name, name, m, us, ceilings.floor_us(num_bytes + 2 * m * (outputs + k), 2.0 * m * n * k)
            )


def bench_dense(shape: LayerShape, ceilings: KernelCeilings, rows: tuple[int, ...]) -> Iterator[KernelTiming]:
    """Time the head in bfloat16, and one projection in FP8."""
    head = [torch.randn(shape.vocab, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for m in rows:
        if m > 512:
            continue
        x = torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16)
        us = time_us([partial(F.linear, x, w) for w in head])
        yield KernelTiming(shape.name, "lm_head", m, us, ceilings.floor_us(head[0].nbytes, 2.0 * m * head[0].numel()))
    del head
    n, k = shape.matrices["gate_up"]
    weights = [Fp8Weight.from_float(torch.randn(n, k, device="cuda")) for _ in range(copies_of(n * k))]
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        us = time_us([partial(fp8_linear, x, w) for w in weights])
        floor = 1e6 * max(n * k / ceilings.read, 2.0 * m * n * k / ceilings.fp8)
        yield KernelTiming(shape.name, "gate_up fp8", m, us, floor)


def bench_attention(shape: LayerShape, ceilings: KernelCeilings) -> Iterator[KernelTiming]:
    """Decodes of several batch sizes and contexts, a verification of five, and a prefill chunk."""
    cases = [(b, 1, c) for b in (1, 8, 32, 128) for c in (512, 1024, 8192) if b * c <= 1 << 18]
    cases += [(1, 5, 1024), (8, 5, 1024), (1, 512, 512), (1, 2048, 2048), (1, 512, 8192)]
    for size, query_len, context in cases:
        q, kv, steps = attention_case(shape, size, query_len, context)
        num_bytes = 4 * size * context * shape.num_kv_heads * shape.head_dim
        us = time_us([partial(paged_attention, q, kv, step, scale=0.09) for step in steps])
        seen = context - (query_len - 1) / 2  # keys a query sees on average
        operations = 4.0 * size * query_len * seen * shape.num_heads * shape.head_dim
        note = f"{size} x {query_len} queries, context {context}"
        yield KernelTiming(
            shape.name, "attention", size * query_len, us, ceilings.floor_us(num_bytes, operations), note
        )


def bench_fused(shape: LayerShape, ceilings: KernelCeilings, rows: tuple[int, ...]) -> Iterator[KernelTiming]:
    """Time the steps between the matrices. They read what the kernel before wrote, so their floor is one launch."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    weight = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    for m in rows:
        x, residual = (torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield KernelTiming(
            shape.name,
            "rms_norm",
            m,
            time_us([partial(rms_norm, x, weight, 1e-5, residual)]),
            ceilings.floor_us(8 * m * shape.hidden),
        )
        gate_up = torch.randn(m, 2 * shape.intermediate, device="cuda", dtype=torch.bfloat16)
        yield KernelTiming(
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
        yield KernelTiming(shape.name, "rope_and_write_kv", m, time_us([turn]), ceilings.floor_us(2.0 * qkv.nbytes))


def bench_sampling(shape: LayerShape, ceilings: KernelCeilings) -> Iterator[KernelTiming]:
    """Time draws: greedy, at a temperature, and with ``top_p``."""
    for m in (1, 8, 32, 128):
        logits = torch.randn(m, shape.vocab, device="cuda") * 3
        seeds = torch.arange(m, device="cuda")
        ones = torch.ones(m, device="cuda")
        drawn = SamplingTensors(temperature=ones, seeds=seeds, positions=seeds)
        filtered = replace(drawn, top_p=ones * 0.9)
        for name, params in (("greedy", SamplingTensors()), ("draw", drawn), ("draw top_p", filtered)):
            us = time_us([partial(sample, logits, params)])
            yield KernelTiming(shape.name, name, m, us, ceilings.floor_us(logits.nbytes))


def print_table(lines: list[KernelTiming]) -> None:
    """Print microseconds over floor, a line per kernel and model, a column per row count."""
    by_kernel: dict[tuple[str, str], dict[int, KernelTiming]] = {}
    for line in lines:
        by_kernel.setdefault((line.model, line.kernel if not line.note else f"{line.kernel}: {line.note}"), {})[
            line.rows
        ] = line
    for (model, kernel), cells in by_kernel.items():
        text = "  ".join(f"{rows}: {line.us:.1f}/{line.floor_us:.1f}" for rows, line in sorted(cells.items()))
        print(f"{model:4} {kernel:18} {text}")


def layer_estimates(lines: list[KernelTiming]) -> Iterator[dict[str, object]]:
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
    parser.add_argument(
        "--sweep", choices=sorted(SWEEPS), help="instead: try every cut of a kernel, or start of a layer"
    )
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
            for record in SWEEPS[options.sweep](shape, rows):
                records.append(record)
                print(json.dumps(record), flush=True)
    else:
        lines: list[KernelTiming] = []
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
