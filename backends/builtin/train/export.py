"""Writes a trained tier as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from backends.builtin.quantize import pack
from backends.builtin.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer
from backends.builtin.train.network import Network, QuantizedLinear
from backends.builtin.train.specs import BITS, RMS_NORM_EPS, ROPE_THETA, TierSpec


def quantization_config(spec: TierSpec) -> dict[str, Any]:
    """Return the block that readers of the two layouts look for in ``config.json``."""
    common = {"quant_method": spec.quantization, "bits": BITS, "group_size": spec.group_size}
    if spec.quantization == "awq":
        return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return common | {
        "sym": True,
        "desc_act": False,
        "damp_percent": 0.01,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }


def hf_config(spec: TierSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``config.json`` of a tier."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.context_length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "quantization_config": quantization_config(spec),
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }


def packed_state(network: Network) -> dict[str, Tensor]:
    """Return the checkpoint's tensors: packed linear layers, embeddings and norms in float16."""
    state: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if isinstance(module, QuantizedLinear):
            packed = pack(module.weight.detach(), module.group_size, module.layout)
            state |= {f"model.{name}.{suffix}": tensor for suffix, tensor in packed.items()}
    for name, parameter in network.named_parameters():
        if "proj." not in name:
            state[f"model.{name}"] = parameter.detach().half().cpu().contiguous()
    return state


def export(network: Network, tokenizer: Tokenizer, folder: Path, record: dict[str, Any]) -> None:
    """Write weights, config, tokenizer, generation config, and ``training.json`` with what was run."""
    save_tokenizer(tokenizer, folder)
    config = hf_config(network.spec, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(packed_state(network), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
