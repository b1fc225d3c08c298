"""Lists the shapes of public checkpoints that figures are given for, from their ``config.json``; no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.config import ModelConfig, QuantConfig

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_INT4 = QuantConfig("awq", 4, 128)


def _llama(layers: int, hidden: int, inner: int, heads: int, *, tied: bool = False, head_dim: int = 128) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128_256,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": _LLAMA3_ROPE,
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            "eos_token_id": [128_001, 128_008, 128_009],
        }
    )


_3B = _llama(28, 3072, 8192, 24, tied=True)
_8B = _llama(32, 4096, 14_336, 32)
_70B = _llama(80, 8192, 28_672, 64)
# Small enough for a CPU: what the bench itself is tested with.
_TINY = replace(_llama(2, 128, 256, 8, head_dim=16), vocab_size=512, eos_token_ids=(1,), context_length=8192)

SHAPES: Mapping[str, ModelConfig] = {
    "3b-int4": replace(_3B, quant=_INT4),
    "8b-int4": replace(_8B, quant=_INT4),
    "8b-bf16": _8B,
    "70b-int4": replace(_70B, quant=_INT4),
    "tiny-int4": replace(_TINY, quant=replace(_INT4, group_size=64)),
    "tiny-bf16": _TINY,
}
"""Llama 3.2 3B, Llama 3.1 8B and 70B; INT4 is AWQ's layout with groups of 128, heads and embeddings bfloat16."""
