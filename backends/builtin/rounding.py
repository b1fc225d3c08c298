"""Measures what 8-bit activations cost in quality: the built-in ladder with every row rounded, beside itself.

The arithmetic is that of ``activations = "fp8"`` on a GPU (:mod:`engine.kernels.int4_fp8`) where all steps have many
rows: the input of each projection of the layers is rounded to e4m3 by its row's largest magnitude; weights, sums, the
head are exact. Greedy answers are compared, and the log-probabilities of the right completions.

::

    python -m backends.builtin.rounding --tasks 500 --seed 11
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.builtin.conversations import generation_prompt, turn
from backends.builtin.evaluate import answer_tasks
from backends.builtin.paths import MODELS_DIR
from backends.builtin.reference import load_reference, load_tokenizer
from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.task_generator import NATURAL_MIX, generate
from backends.builtin.tasks.types import Task
from engine.kernels.fp8 import quantize_rows_reference


@contextmanager
def rounded_activations(model: Any) -> Iterator[None]:
    """Round within the block: the projections of the model's layers read rounded rows."""
    projections = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: (_round(inputs[0]),)) for module in projections]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round(rows: Tensor) -> Tensor:
    data, factors = quantize_rows_reference(rows)
    return data.to(rows.dtype) * factors.to(rows.dtype)


@torch.inference_mode()
def compare_logprobs(model: Any, tokenizer: Any, tasks: Sequence[Task], *, thinking: bool) -> dict[str, float]:
    """Measure per token of the right completions what rounding does to its log-probability and to the distribution."""
    sums = torch.zeros(5, dtype=torch.float64)
    num_tokens = 0
    for task in tasks:
        prompt = turn("user", task.prompt) + generation_prompt(thinking)
        answer = f"{task.answer}<|im_end|>"
        completion = f"{task.reasoning}\n</think>\n\n{answer}" if thinking else answer
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
        plain = _distributions(model, before, after)
        with rounded_activations(model):
            noisy = _distributions(model, before, after)
        own, changed = (each[range(len(after)), after] for each in (plain, noisy))
        kl = (plain.exp() * (plain - noisy)).sum(1)
        is_same = (plain.argmax(1) == noisy.argmax(1)).double()
        sums += torch.stack([each.double().sum() for each in (own, changed, (changed - own).abs(), kl, is_same)])
        num_tokens += len(after)
    own_mean, changed_mean, change, kl_mean, same = (sums / num_tokens).tolist()
    return {
        "tokens": num_tokens,
        "perplexity": round(math.exp(-own_mean), 4),
        "perplexity_rounded": round(math.exp(-changed_mean), 4),
        "mean_logprob_change": round(changed_mean - own_mean, 5),
        "mean_absolute_change": round(change, 5),
        "kl": round(kl_mean, 6),
        "same_first_choice": round(same, 4),
    }


def _distributions(model: Any, before: list[int], after: list[int]) -> Tensor:
    """Return log-probabilities (n, vocab) at each token of ``after``."""
    logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def compare(folder: Path, tasks: Sequence[Task], *, thinking: bool, batch_size: int) -> dict[str, float]:
    """Compare greedy answers with and without rounding, how many are the same, and log-probabilities."""
    model, tokenizer = load_reference(folder), load_tokenizer(folder)

    def answers() -> list[str]:
        return [text for text, _ in answer_tasks(model, tokenizer, tasks, thinking=thinking, batch_size=batch_size)]

    plain = answers()
    with rounded_activations(model):
        noisy = answers()
    right = [[check(task, text) for task, text in zip(tasks, texts, strict=True)] for texts in (plain, noisy)]
    return {
        "tasks": len(tasks),
        "right": sum(right[0]),
        "right_rounded": sum(right[1]),
        "lost": sum(a and not b for a, b in zip(*right, strict=True)),
        "won": sum(b and not a for a, b in zip(*right, strict=True)),
        "same_answer": sum(a == b for a, b in zip(plain, noisy, strict=True)),
        **compare_logprobs(model, tokenizer, tasks, thinking=thinking),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m backends.builtin.rounding", description=__doc__)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--runs", nargs="+", default=["1", "2", "3", "3t"], help="folders' tiers; t: thinking")
    arguments = parser.parse_args()
    tasks = list(generate(arguments.seed, arguments.tasks, split="test", mix=NATURAL_MIX))
    for run in arguments.runs:
        folder = MODELS_DIR / f"tier{run.rstrip('t')}"
        found = compare(folder, tasks, thinking=run.endswith("t"), batch_size=arguments.batch_size)
        print(json.dumps({"run": run, "seed": arguments.seed, **found}), flush=True)


if __name__ == "__main__":
    main()
