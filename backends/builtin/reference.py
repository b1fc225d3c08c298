"""Reads the built-in checkpoints plainly: weights dequantised, run by transformers.

The yardstick for the engine's own loaders, and what the ladder's accuracy is measured with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from backends.builtin.quantize import unpack


def dequantized_state(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in float32, its packed layers unpacked."""
    config = json.loads((folder / "config.json").read_text())
    layout = config["quantization_config"]["quant_method"]
    state: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        stem, _, suffix = name.rpartition(".")
        if suffix in ("qweight", "qzeros", "scales", "g_idx"):
            packed.setdefault(stem, {})[suffix] = tensor
        else:
            state[name] = tensor.float()
    return state | {f"{stem}.weight": unpack(parts, layout) for stem, parts in packed.items()}


def load_reference(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return a ``LlamaForCausalLM`` with the dequantised weights."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    state = dequantized_state(folder)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model.to(device=torch.device(device), dtype=dtype).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tier's tokenizer, padding on the left as batched generation needs."""
    return AutoTokenizer.from_pretrained(str(folder), padding_side="left")


@torch.inference_mode()
def generate_answers(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, thinking: bool, max_tokens: int, batch_size: int
) -> list[tuple[str, int]]:
    """Return greedy completions of user prompts, with the number of tokens each took, in the order of the prompts."""
    templated = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        for prompt in prompts
    ]
    # Neighbours of like length pad least.
    order = sorted(range(len(prompts)), key=lambda i: len(templated[i]))
    answers: list[tuple[str, int]] = [("", 0)] * len(prompts)
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        inputs = tokenizer([templated[i] for i in places], return_tensors="pt", padding=True, add_special_tokens=False)
        # Llama has no token types, which some tokenizers return all the same.
        inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
        made = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, pad_token_id=tokenizer.pad_token_id)
        for place, ids in zip(places, made[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            kept = [token for token in ids if token != tokenizer.pad_token_id]
            text = tokenizer.decode(kept, skip_special_tokens=True)
            answers[place] = (("<think>\n" + text) if thinking else text, len(kept))
    return answers
