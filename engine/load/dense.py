"""Reads a checkpoint's weights with every 4-bit layer written out, by Hugging Face names, for a reference to load."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.load.awq import read_awq
from engine.load.gptq import read_gptq
from engine.load.source import load_config, resolve_checkpoint
from engine.load.tensors import TensorFiles


def dense_state_dict(source: str | Path) -> dict[str, Tensor]:
    """Return float32 tensors of a checkpoint, quantised or not, as ``model.load_state_dict`` takes them.

    Raises
    ------
    engine.errors.LoadError
    """
    folder = resolve_checkpoint(source)
    config, files = load_config(folder), TensorFiles(folder)
    sizes = {
        "q_proj": (config.hidden_size, config.q_size),
        "k_proj": (config.hidden_size, config.kv_size),
        "v_proj": (config.hidden_size, config.kv_size),
        "o_proj": (config.q_size, config.hidden_size),
        "gate_proj": (config.hidden_size, config.intermediate_size),
        "up_proj": (config.hidden_size, config.intermediate_size),
        "down_proj": (config.intermediate_size, config.hidden_size),
    }
    quant, tensors = config.quant, {}
    for name in files.names():
        base, _, suffix = name.rpartition(".")
        if quant is not None and suffix == "qweight":
            read = read_awq if quant.method == "awq" else read_gptq
            in_features, out_features = sizes[base.rpartition(".")[2]]
            tensors[f"{base}.weight"] = read(files, base, in_features, out_features, quant).dequantize()
        elif suffix in ("weight", "bias") and f"{base}.qweight" not in files:
            tensors[name] = files.take(name).to(torch.float32)
    if config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors
