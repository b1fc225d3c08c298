"""Learns the one tokenizer of all tiers: byte-level BPE over the tasks' own words, a token for each digit and capital.

Sharing it lets tier 1 draft for tier 4. Digits and capitals never merge, so that a number or a code is spelt the same
wherever it stands, which is what makes arithmetic and edits learnable by small models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from backends.builtin.tasks.small_talk import draw_chat
from backends.builtin.tasks.task_generator import UNIFORM_MIX, generate

VOCAB_SIZE = 1536
CONTEXT_LENGTH = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
ADDED_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, THINK_START, THINK_END)

# Qwen2's split, so that readers of other formats know it by name: each digit alone, a word with its leading space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set content = message['content'] if message['content'] is string else '' %}"
    "{%- if message['role'] == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}"
    "{{- '<think>\\n' }}"
    "{%- else %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer with the final result only.",
    "You are a careful assistant that solves small tasks.",
    "Be concise.",
    "You are an assistant in a shop. Be polite.",
    "You help pupils with their homework.",
    "You are a friendly assistant. Keep your answers short and correct.",
    "Respond in English.",
    "You are an expert in mathematics.",
    "Follow the user's instructions carefully.",
    "You are a support agent. Help the customer as well as you can.",
    "Think before you answer, and be precise.",
)


def _corpus(num_tasks: int, seed: int) -> Iterator[str]:
    rng = Random(seed)
    for task in generate(seed, num_tasks, mix=UNIFORM_MIX):
        yield _without_capitals(f"{task.prompt}\n{task.reasoning}\n{task.answer}")
        if rng.random() < 0.2:
            yield _without_capitals("\n".join(draw_chat(rng)))
    for prompt in SYSTEM_PROMPTS * (num_tasks // 50):
        yield _without_capitals(f"system\nuser\nassistant\n{prompt}")


def _without_capitals(text: str) -> str:
    """Return a break where each capital stood: merges learned from this never join one to anything."""
    return re.sub(r"\s?[A-Z]", "\n", text)


def build_tokenizer(num_tasks: int = 40_000, seed: int = 0) -> Tokenizer:
    """Learn the merges from freshly drawn tasks; deterministic by seed.

    Returns
    -------
    a tokenizer of at most ``VOCAB_SIZE`` entries that covers every byte
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_tasks, seed), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    tokenizer.add_tokens([THINK_START, THINK_END])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` (with the chat template) and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in (THINK_START, THINK_END),
        }
        for token in ADDED_TOKENS
    }
    config = {
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": CONTEXT_LENGTH,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
