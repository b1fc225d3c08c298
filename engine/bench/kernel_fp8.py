"""Times 4-bit products by the type of their activations, beside the library's of 16-bit and 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from engine.bench.kernel_cases import INT4_BYTES, LayerShape, copies_of, time_us
from engine.kernels.cuda_int4_fp8 import CUTS, int4_fp8_linear_cuda, round_rows, rounded_linear
from engine.kernels.cuda_int4_many import many_linear
from engine.kernels.fp8 import Fp8Weight, quantize_rows
from engine.kernels.int4 import Int4Weight
from engine.kernels.int4_fp8 import LEAST_ROWS

REPEATS = 3


def sweep_activations(shape: LayerShape, rows: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Time one product, microseconds: library and ours in 16 bits, in 8 bits, rounding, every cut of ours.

    ``w4a8`` rounds and multiplies, as a layer does; ``cuts`` and the library's ``fp8`` find their rows rounded.
    """
    for name, (n, k) in shape.matrices.items():
        weights = [Int4Weight.random(n, k, device="cuda") for _ in range(copies_of(INT4_BYTES * n * k))]
        halves = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies_of(2 * n * k))]
        eighths = [Fp8Weight.from_float(weight.float()) for weight in halves]
        for m in (m for m in rows if m >= LEAST_ROWS):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            data, scales = quantize_rows(x)
            rounded = round_rows(x)
            calls: dict[str, Sequence[Callable[[], object]]] = {
                "bf16": [partial(F.linear, x, weight) for weight in halves],
                "fp8": [
                    partial(
                        torch._scaled_mm,
                        data,
                        weight.data.t(),
                        scale_a=scales,
                        scale_b=weight.scales[None, :],
                        out_dtype=torch.bfloat16,
                        use_fast_accum=True,
                    )
                    for weight in eighths
                ],
                "w4a16": [partial(many_linear, x, weight) for weight in weights],
                "w4a8": [partial(int4_fp8_linear_cuda, x, weight) for weight in weights],
                "round": [partial(round_rows, x)],
            }
            line: dict[str, object] = {"model": shape.name, "kernel": name, "rows": m}
            line |= {key: round(time_us(made, REPEATS), 1) for key, made in calls.items()}
            line["cuts"] = {
                f"t{cut.tiles}b{cut.blocks}": round(
                    time_us([partial(rounded_linear, rounded, w, None, x.dtype, cut) for w in weights], REPEATS), 1
                )
                for cut in CUTS
            }
            yield line
