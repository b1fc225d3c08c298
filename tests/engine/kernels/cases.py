"""Random inputs of odd shapes, shared by the tests of references and of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.paged_step import PagedStep
from engine.layers.quant import QuantWeight


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_quant(
    rows: int, inputs: int, group_size: int, *, seed: int = 0, ordered: bool = False, dtype: torch.dtype = torch.float16
) -> QuantWeight:
    """Asymmetric codes with scales around 0.02."""
    gen = generator(seed)
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 16, (rows, inputs), generator=gen, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=gen) * 0.02 + 0.01).to(dtype)
    zeros = torch.randint(0, 16, (rows, groups), generator=gen, dtype=torch.uint8)
    order = torch.randperm(inputs, generator=gen) if ordered else None
    return QuantWeight.from_codes(codes, scales, zeros, group_size, order)


@dataclass
class PagedCase:
    """A mixed batch over a shuffled pool."""

    q: Tensor
    kv_cache: Tensor
    step: PagedStep
    scale: float

    def to(self, device: str, dtype: torch.dtype) -> PagedCase:
        step = PagedStep(
            self.step.block_tables.to(device),
            self.step.context_lens.to(device),
            self.step.query_starts.to(device),
            self.step.slots.to(device),
            self.step.max_query_len,
        )
        return PagedCase(self.q.to(device, dtype), self.kv_cache.to(device, dtype), step, self.scale)


def paged_case(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    seed: int = 0,
) -> PagedCase:
    """Sequences whose blocks lie scattered; what no sequence owns is NaN, so that reading it shows."""
    gen = generator(seed)
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=gen).tolist()
    width = max([*needed, 1]) + 1
    tables = torch.zeros(len(needed), width, dtype=torch.int32)
    kv = torch.full((num_blocks, block_size, 2, num_kv_heads, head_dim), float("nan"))
    for row, (count, length) in enumerate(zip(needed, context_lens, strict=True)):
        own = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
        tables[row, count:] = own[-1] if own else 0
        fresh = torch.randn(count * block_size, 2, num_kv_heads, head_dim, generator=gen)
        fresh[length:] = 0.0
        kv[own] = fresh.view(count, block_size, 2, num_kv_heads, head_dim)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=gen)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    slots = [
        -1 if position < 0 else int(tables[row, position // block_size]) * block_size + position % block_size
        for row, (query_len, length) in enumerate(zip(query_lens, context_lens, strict=True))
        for position in range(length - query_len, length)
    ]
    step = PagedStep(tables, lens, starts, torch.tensor(slots), max(query_lens))
    return PagedCase(q, kv, step, head_dim**-0.5)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm, against a float64 reference; NaN if there is one."""
    difference = out.double().cpu() - exact.double().cpu()
    return float(difference.norm() / exact.double().norm().cpu())
