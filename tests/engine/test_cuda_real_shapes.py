"""Layers of the sizes that people serve, on a CUDA device, against transformers: same greedy tokens, or a near tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine, collect
from engine.load.model import load_model
from engine.models.decoder import DecoderModel
from engine.request import Request, SamplingParams
from engine.sink import QueueSink
from tests.engine.checkpoints import make_reference, save_quantized, save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Widths of Llama 3.2 3B, Llama 3.1 8B, Mistral 7B, Qwen2.5 7B and Qwen3 8B, each cut to two layers.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3b": (
        "Llama",
        {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8},
    ),
    "llama-8b": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "mistral-7b": (
        "Mistral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 128,
        },
    ),
    "qwen2-7b": (
        "Qwen2",
        {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    ),
    "qwen3-8b": (
        "Qwen3",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
}
# Llama 3.1 70B, one layer of it, and the 8B: what the ladder serves in 4 bits.
QUANTIZED: dict[str, dict[str, Any]] = {
    "llama-8b": SHAPES["llama-8b"][1],
    "llama-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
    },
}
# Chunks of 256: the longest prompt is computed in two, beside the others' tokens.
CONFIG = EngineConfig(block_size=16, num_blocks=256, max_num_seqs=8, max_batch_tokens=256)
PROMPT_LENGTHS = (5, 40, 200, 333)
NEW_TOKENS = 16


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(3, vocab_size, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]


def greedy_answers(model: DecoderModel) -> list[tuple[int, ...]]:
    """All prompts at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = Engine(model, CONFIG)
    sinks = [QueueSink() for _ in PROMPT_LENGTHS]
    try:
        for index, prompt in enumerate(prompts(model.config.vocab_size)):
            engine.submit(Request(f"r{index}", prompt, sampling), sinks[index])
        return [collect(sink, 240.0).token_ids for sink in sinks]
    finally:
        engine.close()


def reference_logits(reference: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """float32 (len(answer), vocabulary): what transformers would have chosen each of the answer's tokens from."""
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([prompt + answer], device="cuda")).logits
    return logits[0, len(prompt) - 1 : -1].float()


def assert_same_or_near_tie(model: DecoderModel, reference: Any, rounding: float) -> None:
    """Every token we chose is transformers' own, or lies within ``rounding`` of its first two.

    ``reference`` computes in float32, from the weights as the model has them: only our own rounding is between the two.
    """
    for prompt, answer in zip(prompts(model.config.vocab_size), greedy_answers(model), strict=True):
        logits = reference_logits(reference, prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])
        first_two = logits.topk(2).values
        assert (first_two[:, :1] - chosen).max().item() <= 2 * rounding
        assert (first_two[:, 1:] - chosen).max().item() <= rounding


# How far our logits, of about 6, may lie from exact ones: sums in another order, or states kept to 8 bits.
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_real_widths_are_transformers(
    shape: str, dtype: torch.dtype, rounding: float, tmp_path: Path
) -> None:
    architecture, sizes = SHAPES[shape]
    reference = make_reference(architecture, device="cuda", **COMMON, **sizes)
    # Weights alone: `reference.to(dtype)` would round the frequencies of the positions with them.
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(weight.to(dtype))
    model = load_model(save_reference(reference, tmp_path), dtype=dtype, device="cuda")
    assert model.prefers_fused == (dtype == torch.bfloat16)
    assert_same_or_near_tie(model, reference, rounding)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("shape", QUANTIZED)
def test_four_bit_layers_of_real_widths_are_their_dequantised_weights(shape: str, method: Any, tmp_path: Path) -> None:
    made = make_reference("Llama", device="cuda", **{**COMMON, **QUANTIZED[shape]})
    dequantised = save_quantized(made, tmp_path, method, group_size=128, symmetric=method == "gptq")
    model = load_model(tmp_path, dtype=torch.bfloat16, device="cuda")
    assert_same_or_near_tie(model, dequantised, 0.15)  # 0.106 was seen
