"""Random tiny checkpoints in the layouts the ecosystem writes, with the dequantised weights as their reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.load.awq import AWQ_ORDER

# Small enough for milliseconds, uneven enough to catch a swapped size: 6 query heads on 2 KV heads, odd vocabulary.
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_reference(architecture: str = "Llama", *, seed: int = 0, device: str = "cpu", **overrides: Any) -> Any:
    """A random transformers model, float32, in eval mode; ``architecture`` is Llama, Mistral, Qwen2 or Qwen3.

    Weights are drawn wider than transformers does, so that attention is far from uniform and a wrong mask, angle or
    norm shows in every logit; biases and norm weights are random too.
    """
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, **overrides})
    torch.manual_seed(seed)
    with torch.device(device):
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            if name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
    return model


def save_reference(model: Any, folder: Path, **options: Any) -> Path:
    """Write a transformers model as transformers writes it."""
    model.save_pretrained(folder, **options)
    return folder


def quantize_groups(
    weight: Tensor, group_size: int, *, symmetric: bool, group_of_input: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Round to nearest, per group: codes (out, in) 0..15, scales (out, groups) float16, zeros (out, groups)."""
    groups = int(group_of_input.max()) + 1
    codes = torch.empty_like(weight)
    scales, zeros = (torch.empty(weight.shape[0], groups, device=weight.device) for _ in range(2))
    for group in range(groups):
        part = weight[:, group_of_input == group]
        if symmetric:
            scale = (part.abs().amax(1) / 7).half().float().clamp_min(1e-4)
            zero = torch.full_like(scale, 8)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale = ((high - low) / 15).half().float().clamp_min(1e-4)
            zero = (-low / scale).round().clamp(0, 15)
        codes[:, group_of_input == group] = (part / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        scales[:, group], zeros[:, group] = scale, zero
    return codes.to(torch.uint8), scales.half(), zeros.to(torch.uint8)


def dequantize_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_of_input: Tensor) -> Tensor:
    """float32 (out, in), written independently of the engine's own arithmetic."""
    return (codes.float() - zeros.float()[:, group_of_input]) * scales.float()[:, group_of_input]


def save_quantized(
    model: Any,
    folder: Path,
    method: Literal["awq", "gptq"],
    *,
    group_size: int = 32,
    symmetric: bool = True,
    desc_act: bool = False,
    checkpoint_format: str = "gptq",
    seed: int = 0,
) -> Any:
    """Write ``model`` 4-bit quantised; returns a copy of it that holds the dequantised weights."""
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, parameter in reference.state_dict().items():
        if not name.startswith("model.layers.") or not name.endswith("proj.weight"):
            tensors[name] = parameter.clone()
            continue
        base = name.removesuffix(".weight")
        size = parameter.shape[1] if group_size == -1 else group_size
        groups = torch.arange(parameter.shape[1], device=parameter.device) // size
        if desc_act:
            groups = groups[torch.randperm(len(groups), generator=generator).to(groups.device)]
        codes, scales, zeros = quantize_groups(parameter, size, symmetric=symmetric, group_of_input=groups)
        parameter.copy_(dequantize_groups(codes, scales, zeros, groups))
        tensors[f"{base}.scales"] = scales.t().contiguous()
        if method == "awq":
            tensors[f"{base}.qweight"] = pack_awq(codes.t())
            tensors[f"{base}.qzeros"] = pack_awq(zeros.t())
        else:
            stored = (zeros.to(torch.int16) - 1) & 15 if checkpoint_format == "gptq" else zeros
            tensors[f"{base}.qweight"] = pack_rows(codes.t())
            tensors[f"{base}.qzeros"] = pack_rows(stored).t().contiguous()
            tensors[f"{base}.g_idx"] = groups.to(torch.int32)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config["quantization_config"] = _quantization_config(method, group_size, symmetric, desc_act, checkpoint_format)
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def _quantization_config(
    method: str, group_size: int, symmetric: bool, desc_act: bool, checkpoint_format: str
) -> dict[str, Any]:
    common: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group_size}
    if method == "awq":
        return common | {"version": "gemm", "zero_point": True}
    return common | {"sym": symmetric, "desc_act": desc_act, "checkpoint_format": checkpoint_format}


def pack_awq(codes: Tensor) -> Tensor:
    """Undo :func:`engine.load.awq.unpack_awq`."""
    grouped = codes.to(torch.int64).view(codes.shape[0], -1, 8)[..., list(AWQ_ORDER)]
    words = (grouped << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_rows(codes: Tensor) -> Tensor:
    """Undo :func:`engine.load.gptq.unpack_rows`."""
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = (codes.to(torch.int64).view(-1, 8, codes.shape[1]) << shifts[None, :, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
