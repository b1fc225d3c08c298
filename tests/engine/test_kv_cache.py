"""The pool's arithmetic, and a batch's layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import ModelConfig
from engine.errors import OutOfMemoryPlan
from engine.kv_cache import KVCache, KVPlan, kv_bytes_per_token, plan_kv

LLAMA_8B = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)


def test_published_sizes() -> None:
    """Llama 3 8B takes 128 KiB of bfloat16 KV a token."""
    assert kv_bytes_per_token(LLAMA_8B, torch.bfloat16) == 128 * 1024


@given(
    free_bytes=st.integers(0, 2**37),
    block_size=st.sampled_from([1, 8, 16, 64]),
    share=st.floats(0.1, 1.0),
    min_tokens=st.integers(1, 10_000),
    max_tokens=st.none() | st.integers(1, 100_000),
)
def test_a_plan_fits_and_suffices_or_is_refused(
    free_bytes: int, block_size: int, share: float, min_tokens: int, max_tokens: int | None
) -> None:
    needed_bytes = -(-min_tokens // block_size) * kv_bytes_per_token(LLAMA_8B, torch.bfloat16) * block_size

    def make() -> KVPlan:
        return plan_kv(
            LLAMA_8B,
            free_bytes,
            dtype=torch.bfloat16,
            block_size=block_size,
            share=share,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
        )

    if needed_bytes > int(free_bytes * share):
        with pytest.raises(OutOfMemoryPlan) as caught:
            make()
        assert caught.value.needed_bytes == needed_bytes
        return
    plan = make()
    assert plan.kv_bytes <= free_bytes * share
    assert plan.num_tokens >= min_tokens
    if max_tokens is not None:
        assert plan.num_tokens < max(max_tokens, min_tokens) + block_size


def test_a_refusal_shows_its_arithmetic() -> None:
    with pytest.raises(OutOfMemoryPlan) as caught:
        plan_kv(LLAMA_8B, 10**9, dtype=torch.bfloat16)
    text = str(caught.value)
    for number in ("512 blocks", "16 tokens", "131072 bytes/token", "32 layers", "1,073,741,824", "900,000,000"):
        assert number in text


def test_pool_is_as_large_as_planned() -> None:
    plan = plan_kv(LLAMA_8B, 2 * 10**7, dtype=torch.float32, min_tokens=16)
    cache = KVCache(LLAMA_8B, plan.num_blocks, plan.block_size)
    assert cache.kv_bytes == plan.kv_bytes


def test_clearing_touches_only_the_blocks_named() -> None:
    cache = KVCache(LLAMA_8B, 4, 2)
    for layer in cache.layers:
        layer.fill_(float("nan"))
    cache.clear([1, 3])
    for layer in cache.layers:
        assert not layer[[1, 3]].any()
        assert layer[[0, 2]].isnan().all()


def test_batch_layout() -> None:
    batch = Batch.build([[7, 8, 9], [4]], [5, 9], [[3, 1], [0, 5, 2]], block_size=4)
    assert batch.positions.tolist() == [2, 3, 4, 8]
    assert batch.slot_mapping.tolist() == [3 * 4 + 2, 3 * 4 + 3, 1 * 4, 2 * 4]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.logits_rows.tolist() == [2, 3]
    assert batch.block_tables.tolist() == [[3, 1, 1], [0, 5, 2]]
    assert (batch.num_tokens, batch.num_sequences) == (4, 2)
