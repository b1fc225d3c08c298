"""Does the small steps between a decoder layer's matrices, each one launch: norm, rotary turn with KV write, gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.dispatch import runs_on_gpu
from engine.kernels.paged_step import NO_NORMS, HeadNorms


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    Parameters
    ----------
    x : (T, H), what the last sub-layer gave, contiguous
    weight : (H,)
    residual : (T, H) or None when ``x`` is the stream itself

    Returns
    -------
    y, residual : (T, H) each in ``x``'s dtype; the norm is taken in float32 of the rounded sum (Zhang & Sennrich 2019,
        eq. 4). ``residual`` is a new tensor, or ``x`` where none was given.
    """
    if runs_on_gpu(x):
        from engine.kernels.triton_fused import rms_norm_triton

        return rms_norm_triton(x, weight, eps, residual)
    return rms_norm_reference(x, weight, eps, residual)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute :func:`rms_norm` in plain torch."""
    stream = x if residual is None else x + residual
    wide = stream.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), stream


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of rows (T, 2 * I) that hold the gate first; (T, I) (Shazeer 2020, eq. 6)."""
    if runs_on_gpu(gate_up):
        from engine.kernels.triton_fused import silu_and_mul_triton

        return silu_and_mul_triton(gate_up)
    return silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Compute :func:`silu_and_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rope_tables(positions: Tensor, inv_freq: Tensor, attention_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 (T, head_dim / 2) each, of positions (T,); once a step, for all layers."""
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    norms: HeadNorms = NO_NORMS,
) -> Tensor:
    """Normalise heads (if asked), turn queries and keys, and put keys and values into the cache.

    Parameters
    ----------
    q : (T, Hq, D), k, v : (T, Hkv, D); may be views of one fused row, D contiguous, heads one after the other.
        ``q`` is overwritten.
    cos, sin : float32 (rows, D / 2); token t uses row ``positions[t]``, or row t where ``positions`` is None
        (:func:`rope_tables`). Halves are turned against each other (Su et al. 2021, eq. 34, in the half-split form).
    slots : int64 (T,), ``block_id * block_size + offset``; below 0: the token's key and value are not written
    kv_cache : (num_blocks, block_size, 2, Hkv, D), written; a block may be strided
    norms : of query and key heads, before the turn

    Returns
    -------
    ``q``, turned
    """
    if runs_on_gpu(q):
        from engine.kernels.triton_fused import rope_and_write_kv_triton

        return rope_and_write_kv_triton(q, k, v, cos, sin, positions, slots, kv_cache, norms)
    return rope_and_write_kv_reference(q, k, v, cos, sin, positions, slots, kv_cache, norms)


def rope_and_write_kv_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    norms: HeadNorms = NO_NORMS,
) -> Tensor:
    """Compute :func:`rope_and_write_kv` in plain torch."""
    if positions is not None:
        cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    turned = _turn(_head_norm(k, norms.key, norms.eps), cos, sin).to(k.dtype)
    kept = slots >= 0
    place, block_size = slots[kept], kv_cache.shape[1]
    kv_cache[place // block_size, place % block_size] = torch.stack((turned[kept], v[kept]), dim=1)
    q.copy_(_turn(_head_norm(q, norms.query, norms.eps), cos, sin))
    return q


def _head_norm(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return float32 (T, heads, D); a norm's result is rounded to the heads' dtype, as a layer of its own would."""
    wide = heads.float()
    if weight is None:
        return wide
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(heads.dtype).float()


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
