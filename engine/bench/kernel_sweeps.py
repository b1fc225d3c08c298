"""Sweeps the ways to cut and start kernels; their defaults were chosen by these figures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from engine.bench.kernel_cases import INT4_BYTES, LayerShape, attention_case, copies_of, time_us
from engine.bench.kernel_fp8 import sweep_activations
from engine.kernels.cuda_int4 import (
    EXCLUSIVE_KIB,
    FEW_ROWS,
    SHARED_KIB,
    StreamConfig,
    int4_linear_cuda,
)
from engine.kernels.cuda_int4_many import CUTS, many_linear, num_multiprocessors, plan_tiles
from engine.kernels.fused import rms_norm, rope_and_write_kv, rope_tables
from engine.kernels.int4 import Int4Weight
from engine.kernels.paged_attention import paged_attention


def sweep_int4(shape: LayerShape, rows: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Time every cut of the INT4 kernels; ``StreamConfig``'s defaults and ``CUTS``' figures were chosen by it."""
    for name, (n, k) in shape.matrices.items():
        is_gated = name == "gate_up"
        weights = [
            Int4Weight.random(n, k, is_gated=is_gated, device="cuda") for _ in range(copies_of(INT4_BYTES * n * k))
        ]
        blocks, units = weights[0].codes.shape[:2]
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            line: dict[str, object] = {"model": shape.name, "kernel": name, "rows": m}
            if m <= FEW_ROWS:
                few = ((1, 2, 112), (2, 2, 112), (2, 1, 112), (2, 1, 220))
                for tiles, per_sm, kib in few if m <= 16 else ((1, 1, 120), (1, 1, 220), (2, 1, 160), (2, 1, 220)):
                    config = StreamConfig(tiles, per_sm, kib)
                    key = f"t{tiles}b{per_sm}s{kib}"
                    line[key] = round(
                        time_us([partial(int4_linear_cuda, x, w, None, config) for w in weights]),
                        1,
                    )
            else:
                for cut, splits in itertools.product(CUTS, (False, True)):
                    plan = plan_tiles(cut, m, blocks, units, num_multiprocessors(0), splits=splits)
                    us = time_us([partial(many_linear, x, w, None, plan) for w in weights], 3)
                    line[f"{cut.tiles}x{cut.blocks} {'split' if splits else 'whole'}"] = round(us, 1)
            yield line


def sweep_layer(shape: LayerShape, rows: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Time a decoder layer as a decode step runs it, under the ways in which a 4-bit kernel may start.

    Timings of one kernel after itself do not show how thread blocks of unlike kernels share the multiprocessors.
    """
    starts = {
        "chosen": StreamConfig(),
        "late": StreamConfig(early=False, shared_kib=SHARED_KIB),
        "early": StreamConfig(early=True, shared_kib=SHARED_KIB),
        "early alone": StreamConfig(early=True, shared_kib=EXCLUSIVE_KIB),
        "late alone": StreamConfig(early=False, shared_kib=EXCLUSIVE_KIB),
    }
    weights = [
        {
            name: Int4Weight.random(n, k, is_gated=name == "gate_up", device="cuda")
            for name, (n, k) in shape.matrices.items()
        }
        for _ in range(4)
    ]
    for m in (m for m in rows if m <= FEW_ROWS):
        line: dict[str, object] = {"model": shape.name, "kernel": "layer", "rows": m}
        for name, config in starts.items():
            line[name] = round(time_us([partial(_layer_step(shape, m, config), each) for each in weights]), 1)
        yield line


def _layer_step(shape: LayerShape, m: int, config: StreamConfig) -> Callable[[dict[str, Int4Weight]], Tensor]:
    """Make one layer over m sequences of 1,024 tokens."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q_size, kv_size = heads * dim, kv_heads * dim
    x, residual = (torch.randn(m, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    _, kv, steps = attention_case(shape, m, 1, 1024)
    paged = steps[0]
    cos, sin = rope_tables(torch.full((m,), 1023, device="cuda"), torch.rand(dim // 2, device="cuda"))

    def step(weights: dict[str, Int4Weight]) -> Tensor:
        normed, stream = rms_norm(x, norm, 1e-5, residual)
        qkv = int4_linear_cuda(normed, weights["qkv"], None, config)
        q, k, v = (part.view(m, -1, dim) for part in torch.split(qkv, [q_size, kv_size, kv_size], dim=1))
        rope_and_write_kv(q, k, v, cos, sin, None, paged.slots, kv)
        seen = paged_attention(q, kv, paged, scale=0.09)
        normed, stream = rms_norm(int4_linear_cuda(seen.flatten(1), weights["o"], None, config), norm, 1e-5, stream)
        gated = int4_linear_cuda(normed, weights["gate_up"], None, config)
        return int4_linear_cuda(gated, weights["down"], None, config)

    return step


def sweep_attention(shape: LayerShape, _rows: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Cuts of the attention kernel, to choose :func:`engine.kernels.triton_attention.choose_config` by."""
    from engine.kernels.triton_attention import AttentionConfig, paged_attention_triton

    group = shape.num_heads // shape.num_kv_heads
    cases = [(1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (32, 1, 8192), (128, 1, 1024), (1, 512, 512), (1, 2048, 2048)]
    for size, query_len, context in cases:
        q, kv, steps = attention_case(shape, size, query_len, context)
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
            calls = [partial(paged_attention_triton, q, kv, step, 0.09, None, None, cut) for step in steps]
            key = f"r{cut.rows}t{cut.tile}s{cut.splits}w{cut.num_warps}p{cut.num_stages}"
            try:
                line[key] = round(time_us(calls, 3), 1)
            except Exception as error:  # a cut that does not fit the chip
                line[key] = type(error).__name__
        yield line


SWEEPS = {
    "int4": sweep_int4,
    "layer": sweep_layer,
    "attention": sweep_attention,
    "activations": sweep_activations,
}
