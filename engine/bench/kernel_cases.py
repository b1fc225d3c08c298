"""Holds the cases of the kernels' bench and sweeps: model shapes, ceilings, timing by graph replay, paged inputs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.kernels.fp8 import Fp8Weight, quantize_rows
from engine.kernels.paged_step import PagedStep

CACHE_BYTES = 192 << 20  # of distinct weights that one timing walks through: three times an H200's L2
INT4_BYTES = 0.53125  # a weight of groups of 128: a nibble, and four bytes a group
BLOCK_SIZE = 16
WARM_S = 0.02


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Holds the sizes of a Llama's layer."""

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
        """Return (out, in) of a layer's four."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden),
            "o": (self.hidden, self.num_heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


SHAPES = (
    LayerShape("3b", 3072, 8192, 24, 8, 28),
    LayerShape("8b", 4096, 14336, 32, 8, 32),
    LayerShape("70b", 8192, 28672, 64, 8, 80),
)


@dataclass(frozen=True, slots=True)
class KernelCeilings:
    """Holds the measured rates of this GPU: bytes per second read, bf16 and fp8 operations per second."""

    read: float
    bf16: float
    fp8: float

    def floor_us(self, num_bytes: float, operations: float = 0.0) -> float:
        return 1e6 * max(num_bytes / self.read, operations / self.bf16)


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Holds one timing beside its floor."""

    model: str
    kernel: str
    rows: int
    us: float
    floor_us: float
    note: str = ""


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Return the microseconds per call of ``calls`` made in turn in a replayed graph, the median of ``repeats``."""
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


def measure_ceilings() -> KernelCeilings:
    """Measure reading 4 GiB by a maximum over rows, and square products of 8192."""
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

    return KernelCeilings(read, bf16, operations / time_us([multiply_fp8]) * 1e6)


def _read_bandwidth() -> float:
    data = torch.randint(0, 255, (8192, 1 << 19), dtype=torch.uint8, device="cuda").view(torch.int64)
    num_bytes = float(data.nbytes)
    return 1e6 * num_bytes / time_us([partial(data.amax, dim=1)])


def copies_of(num_bytes: float) -> int:
    return max(2, math.ceil(CACHE_BYTES / num_bytes))


def attention_case(
    shape: LayerShape, size: int, query_len: int, context: int
) -> tuple[Tensor, Tensor, list[PagedStep]]:
    """Make queries, a pool, and several steps that read it at places of their own."""
    blocks_each = context // BLOCK_SIZE
    copies = min(copies_of(4 * size * context * shape.num_kv_heads * shape.head_dim), 64)
    pool = (copies * size * blocks_each, BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim)
    kv = torch.randn(pool, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(pool[0], device="cuda").view(copies, size, blocks_each).to(torch.int32)
    lens = torch.full((size,), context, dtype=torch.int32, device="cuda")
    starts = (torch.arange(size + 1, device="cuda") * query_len).to(torch.int32)
    q = torch.randn(size * query_len, shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    last = torch.arange(context - query_len, context, device="cuda")
    slots = tables[..., last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
    return q, kv, [PagedStep(tables[i], lens, starts, slots[i].flatten(), query_len) for i in range(copies)]
