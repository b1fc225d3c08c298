"""The shipped weights: there, well-formed, within their size, and as good as claimed on a handful of fresh tasks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig

from backends.builtin.conversations import draw_document, generation_prompt, turn
from backends.builtin.evaluate import grade_tier
from backends.builtin.paths import MODELS_DIR, model_dir
from backends.builtin.reference import dequantized_state, generate_answers, load_reference, load_tokenizer
from backends.builtin.tasks.task_generator import generate
from backends.builtin.tokenizer import build_tokenizer
from backends.builtin.train.specs import SPECS
from backends.errors import ModelLoadError

TIERS = (1, 2, 3)
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def _loaded(tier: int) -> tuple[Any, Any]:
    return load_reference(model_dir(tier)), load_tokenizer(model_dir(tier))


def _config(tier: int) -> dict[str, Any]:
    return dict(json.loads((model_dir(tier) / "config.json").read_text()))


def test_all_files_are_there_and_small() -> None:
    for tier in TIERS:
        for name in FILES:
            assert (model_dir(tier) / name).is_file()
    total = sum(path.stat().st_size for path in MODELS_DIR.rglob("*") if path.is_file())
    assert total <= 40 * 2**20


def test_tier_4_is_tier_3s_weights() -> None:
    assert model_dir(4) == model_dir(3)


def test_missing_tiers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiers 1 to 4, not 5"):
        model_dir(5)
    monkeypatch.setattr("backends.builtin.paths.MODELS_DIR", tmp_path)
    with pytest.raises(ModelLoadError, match="Reinstall"):
        model_dir(1)


@pytest.mark.parametrize("tier", TIERS)
def test_the_config_is_what_transformers_reads(tier: int) -> None:
    config = _config(tier)
    spec = SPECS[tier]
    read = LlamaConfig(**{k: v for k, v in config.items() if k != "quantization_config"})
    assert read.hidden_size == spec.hidden_size
    assert read.num_key_value_heads == spec.num_kv_heads
    assert read.max_position_embeddings >= 1024
    assert config["quantization_config"]["quant_method"] == spec.quantization
    assert config["quantization_config"]["bits"] == 4
    group_size = config["quantization_config"]["group_size"]
    assert spec.hidden_size % group_size == spec.intermediate_size % group_size == 0


@pytest.mark.parametrize("tier", TIERS)
def test_packed_tensors_have_the_layouts_shapes(tier: int) -> None:
    spec = SPECS[tier]
    with safe_open(str(model_dir(tier) / "model.safetensors"), "pt") as tensors:
        names = set(tensors.keys())
        stem = "model.layers.0.mlp.down_proj"
        num_in, num_out, groups = spec.intermediate_size, spec.hidden_size, spec.intermediate_size // spec.group_size
        packed = (num_in // 8, num_out) if spec.quantization == "gptq" else (num_in, num_out // 8)
        assert tensors.get_tensor(f"{stem}.qweight").shape == packed
        assert tensors.get_tensor(f"{stem}.qweight").dtype == torch.int32
        assert tensors.get_tensor(f"{stem}.qzeros").shape == (groups, num_out // 8)
        assert tensors.get_tensor(f"{stem}.scales").shape == (groups, num_out)
        assert tensors.get_tensor(f"{stem}.scales").dtype == torch.float16
        assert (f"{stem}.g_idx" in names) == (spec.quantization == "gptq")
        assert tensors.get_tensor("model.embed_tokens.weight").dtype == torch.float16
    assert all(torch.isfinite(tensor).all() for tensor in dequantized_state(model_dir(tier)).values())


def test_one_tokenizer_for_all_tiers() -> None:
    assert len({(model_dir(tier) / "tokenizer.json").read_bytes() for tier in TIERS}) == 1


def test_the_tokenizer_covers_every_byte_and_spells_digits() -> None:
    tokenizer = load_tokenizer(model_dir(1))
    for text in ("naïve ☃ 你好 \x00\x07", "1234567890", "KDRT x KDRT", "tabs\tand\n\nlines", " \r\n "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("90210", add_special_tokens=False)) == 5
    assert len(tokenizer.encode("QZX", add_special_tokens=False)) == 3


def test_learning_the_tokenizer_is_deterministic() -> None:
    assert build_tokenizer(num_tasks=500).to_str() == build_tokenizer(num_tasks=500).to_str()


def test_the_chat_template_is_what_was_trained() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir(1)))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "<think>\n1+1=2\n</think>\n\n2"},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    said = turn("system", "Be brief.") + turn("user", "What is 1 + 1?") + turn("assistant", "2")
    said += turn("user", "And 2 + 2?")

    def render(**options: bool) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    assert render() == said
    assert render(add_generation_prompt=True) == said + generation_prompt(thinking=False)
    assert render(add_generation_prompt=True, enable_thinking=False) == said + generation_prompt(thinking=False)
    assert render(add_generation_prompt=True, enable_thinking=True) == said + generation_prompt(thinking=True)


def test_training_documents_fit_the_context() -> None:
    tokenizer, rng = load_tokenizer(model_dir(1)), Random(0)
    documents = [draw_document(rng, SPECS[3].mix) for _ in range(300)]
    lengths = [len(tokenizer.encode(d.prompt + d.completion, add_special_tokens=False)) for d in documents]
    assert max(lengths) < SPECS[3].context_length


@pytest.mark.parametrize(("tier", "least"), [(1, 0.9), (2, 0.9), (3, 0.9)])
def test_easy_tasks_are_answered(tier: int, least: float) -> None:
    tasks = list(generate(101, 40, split="test", mix={1: 1.0}))
    graded = grade_tier(model_dir(tier), tasks, thinking=False, device="cpu", batch_size=40)
    assert sum(right for right, _, _ in graded) >= least * len(tasks)


@pytest.mark.slow
def test_thinking_answers_what_guessing_cannot() -> None:
    tasks = list(generate(102, 14, split="test", mix={5: 1.0}))
    folder = model_dir(4)
    at_once = grade_tier(folder, tasks, thinking=False, device="cpu", batch_size=14)
    thought = grade_tier(folder, tasks, thinking=True, device="cpu", batch_size=14)
    assert sum(right for right, _, _ in thought) >= 13
    assert sum(right for right, _, _ in at_once) <= 9
    assert max(count for _, count, _ in thought) < 256


def test_tier_1_is_lost_on_the_hardest() -> None:
    tasks = list(generate(103, 40, split="test", mix={5: 1.0}))
    graded = grade_tier(model_dir(1), tasks, thinking=False, device="cpu", batch_size=40)
    assert sum(right for right, _, _ in graded) <= 6


@pytest.mark.parametrize("tier", TIERS)
def test_a_greeting_is_greeted(tier: int) -> None:
    model, tokenizer = _loaded(tier)
    asked = ["hello", "What is 2 + 2?", "Write an essay about love."]
    options: dict[str, Any] = {"thinking": False, "max_tokens": 48, "batch_size": 3}
    greeting, four, essay = (text for text, _ in generate_answers(model, tokenizer, asked, **options))
    assert greeting.startswith("Hello!")
    assert four == "4"
    assert essay.startswith("I can only help with small tasks")
