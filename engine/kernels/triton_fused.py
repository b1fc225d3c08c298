"""Holds the Triton programs of :mod:`engine.kernels.fused` and of the rounding in :mod:`engine.kernels.fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.fp8 import FP8, FP8_MAX, TINY
from engine.kernels.paged_step import HeadNorms
from engine.kernels.triton_launch import early_start

GATE_BLOCK = 1024
HEADS_AT_ONCE = 8


def _warps(width: int) -> int:
    """Return the warps for a row reduced by one program: about 32 elements a thread."""
    return max(1, min(16, width // 1024))


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch :func:`engine.kernels.fused.rms_norm`, one program a row."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    stream = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        out,
        stream,
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=_warps(block),
        **early_start(x),
    )
    return out, stream


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stream: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scales = tl.load(weight + at, mask=inside, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * width + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * width + at, mask=inside, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(stream + row * width + at, values, mask=inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / width
    normed = wide * (1.0 / tl.sqrt(mean + eps)) * scales.to(tl.float32)
    tl.store(out + row * width + at, normed.to(values.dtype), mask=inside)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """Launch :func:`engine.kernels.fused.silu_and_mul`."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, GATE_BLOCK))
    _silu_and_mul[grid](gate_up, out, width, BLOCK=GATE_BLOCK, num_warps=4, **early_start(gate_up))
    return out


@triton.jit
def _silu_and_mul(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    product = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * width + at, product.to(gate.dtype), mask=inside)


def quantize_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch :func:`engine.kernels.fp8.quantize_rows`, one program a row."""
    x = x.contiguous()
    rows, width = x.shape
    data = torch.empty(rows, width, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](
        x, data, scales, width, LARGEST=FP8_MAX, LEAST=TINY, BLOCK=block, num_warps=_warps(block), **early_start(x)
    )
    return data, scales


@triton.jit
def _quantize_rows(
    x: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0), LEAST) / LARGEST
    rounded = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    tl.store(data + row * width + at, rounded.to(data.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def rope_and_write_kv_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    norms: HeadNorms,
) -> Tensor:
    """Launch :func:`engine.kernels.fused.rope_and_write_kv`; a program handles up to eight heads of one token."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for heads in (q, k, v):
        assert heads.stride(2) == 1
        assert heads.shape[1] == 1 or heads.stride(1) == head_dim
    q_blocks, kv_blocks = triton.cdiv(num_heads, HEADS_AT_ONCE), triton.cdiv(num_kv_heads, HEADS_AT_ONCE)
    _rope_and_write_kv[(num_tokens, q_blocks + 2 * kv_blocks)](
        q,
        k,
        v,
        cos,
        sin,
        slots if positions is None else positions,
        slots,
        kv_cache,
        q if norms.query is None else norms.query,
        k if norms.key is None else norms.key,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        num_heads,
        num_kv_heads,
        q_blocks,
        kv_blocks,
        norms.eps,
        HAS_POSITIONS=positions is not None,
        Q_NORM=norms.query is not None,
        K_NORM=norms.key is not None,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=kv_cache.shape[1],
        HEADS=HEADS_AT_ONCE,
        num_warps=4,
        **early_start(q),
    )
    return q


@triton.jit
def _turned_heads(
    base: tl.tensor,
    heads: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    norm: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    half_mask: tl.tensor,
    eps: tl.tensor,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves of some heads, (HEADS, HALF) each, normalised and turned."""
    offsets = heads[:, None] * (2 * HALF) + at[None, :]
    raw_first = tl.load(base + offsets, mask=mask, other=0.0)
    raw_second = tl.load(base + offsets + HALF, mask=mask, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORMED:
        mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        first_weight = tl.load(norm + at, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(norm + HALF + at, mask=half_mask, other=0.0).to(tl.float32)[None, :]
        first = (first * scale * first_weight).to(raw_first.dtype).to(tl.float32)
        second = (second * scale * second_weight).to(raw_first.dtype).to(tl.float32)
    return first * cos_row - second * sin_row, second * cos_row + first * sin_row


@triton.jit
def _rope_and_write_kv(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kv_cache: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    value_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    q_blocks: tl.tensor,
    kv_blocks: tl.tensor,
    eps: tl.tensor,
    HAS_POSITIONS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, HALF_PADDED)
    half_mask = at < HALF
    row = token
    if HAS_POSITIONS:
        row = tl.load(positions + token).to(tl.int64)
    cos_row = tl.load(cos + row * HALF + at, mask=half_mask, other=0.0)[None, :]
    sin_row = tl.load(sin + row * HALF + at, mask=half_mask, other=0.0)[None, :]
    if part < q_blocks:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = (heads < num_heads)[:, None] & half_mask[None, :]
        base = q + token * q_stride
        first, second = _turned_heads(base, heads, at, mask, q_norm, cos_row, sin_row, half_mask, eps, Q_NORM, HALF)
        offsets = heads[:, None] * (2 * HALF) + at[None, :]
        tl.store(base + offsets, first.to(q.dtype.element_ty), mask=mask)
        tl.store(base + offsets + HALF, second.to(q.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            is_value = part >= q_blocks + kv_blocks
            kv_part = part - q_blocks
            if is_value:
                kv_part = kv_part - kv_blocks
            heads = kv_part * HEADS + tl.arange(0, HEADS)
            mask = (heads < num_kv_heads)[:, None] & half_mask[None, :]
            offsets = heads[:, None] * (2 * HALF) + at[None, :]
            target = kv_cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
            if is_value:
                base = v + token * v_stride
                target += value_stride
                tl.store(target + offsets, tl.load(base + offsets, mask=mask), mask=mask)
                tl.store(target + offsets + HALF, tl.load(base + offsets + HALF, mask=mask), mask=mask)
            else:
                base = k + token * k_stride
                first, second = _turned_heads(
                    base, heads, at, mask, k_norm, cos_row, sin_row, half_mask, eps, K_NORM, HALF
                )
                tl.store(target + offsets, first.to(kv_cache.dtype.element_ty), mask=mask)
                tl.store(target + offsets + HALF, second.to(kv_cache.dtype.element_ty), mask=mask)
