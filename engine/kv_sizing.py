"""Sizes an engine's KV pool, from what its configuration and the device leave, or from what engines share."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.arena import Arena
from engine.config import EngineConfig, ModelConfig
from engine.kv_cache import KVCache, KVPlan, kv_bytes_per_token, plan_kv


def free_bytes(device: torch.device) -> int:
    """Return the memory that could be taken now: the GPU's free bytes, or the machine's available ones."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; set kv_cache_bytes.")


def context_length_of(config: EngineConfig, model: ModelConfig) -> int:
    """Return the longest prompt and answer; raises ``ValueError`` where that is more than the model was made for."""
    context_length = config.context_length or model.context_length
    if context_length > model.context_length:
        raise ValueError(f"context_length is {context_length}; the model was made for {model.context_length}.")
    return context_length


def make_cache(
    config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device, arena: Arena | None
) -> KVCache:
    """Lay keys and values over shared memory, or memory of their own; raises as :func:`plan_blocks` does."""
    if arena is not None:
        return arena.lay_out(model, config.block_size, dtype)
    plan = plan_blocks(config, model, dtype=dtype, device=device)
    return KVCache(model, plan.num_blocks, plan.block_size, dtype=dtype, device=device)


def plan_blocks(config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> KVPlan:
    """Size the pool.

    ``num_blocks`` is taken as it is; ``kv_cache_bytes`` is filled; else the pool holds ``max_num_seqs`` whole contexts,
    or what 90 % of the GPU's (a quarter of the machine's) free memory holds if that is less.

    Raises
    ------
    OutOfMemoryPlan
        Not even one context fits.
    ValueError
        ``context_length`` exceeds the model's.
    """
    context_length = context_length_of(config, model)
    if config.num_blocks is not None:
        return KVPlan(config.num_blocks, config.block_size, kv_bytes_per_token(model, dtype) * config.block_size)
    if config.kv_cache_bytes is not None:
        return plan_kv(
            model,
            config.kv_cache_bytes,
            dtype=dtype,
            block_size=config.block_size,
            share=1.0,
            min_tokens=context_length,
        )
    return plan_kv(
        model,
        free_bytes(device),
        dtype=dtype,
        block_size=config.block_size,
        share=0.9 if device.type == "cuda" else 0.25,
        max_tokens=context_length * config.max_num_seqs,
        min_tokens=context_length,
    )
