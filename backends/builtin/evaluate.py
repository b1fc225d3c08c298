"""Measure the built-in ladder on fresh test tasks with the reference reader.

::

    python -m backends.builtin.evaluate --tasks 2000 --seed 7
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backends.builtin.paths import MODELS_DIR
from backends.builtin.reference import generate_answers, load_reference, load_tokenizer
from backends.builtin.tasks.answer_checker import check
from backends.builtin.tasks.task_generator import NATURAL_MIX, UNIFORM_MIX, generate
from backends.builtin.tasks.types import GRADES, Task

MAX_THINKING_TOKENS = 320
MAX_ANSWER_TOKENS = 48


def answer_tasks(
    model: Any, tokenizer: Any, tasks: Sequence[Task], *, thinking: bool, batch_size: int
) -> list[tuple[str, int]]:
    """Return a model's greedy answer to each task and the tokens it took."""
    max_tokens = MAX_THINKING_TOKENS if thinking else MAX_ANSWER_TOKENS
    prompts = [task.prompt for task in tasks]
    return generate_answers(model, tokenizer, prompts, thinking=thinking, max_tokens=max_tokens, batch_size=batch_size)


def grade_tier(
    folder: Path, tasks: Sequence[Task], *, thinking: bool, device: str, batch_size: int
) -> list[tuple[bool, int, str]]:
    """Return whether each task was answered rightly, the tokens it took, and the text."""
    model, tokenizer = load_reference(folder, device), load_tokenizer(folder)
    answers = answer_tasks(model, tokenizer, tasks, thinking=thinking, batch_size=batch_size)
    return [(check(task, text), count, text) for task, (text, count) in zip(tasks, answers, strict=True)]


def summarise(tasks: Sequence[Task], graded: Sequence[tuple[bool, int, str]]) -> dict[str, Any]:
    """Sum up accuracy overall, by grade, by family, by both (with n), and mean tokens."""
    cells: dict[str, list[bool]] = defaultdict(list)
    for task, (right, _, _) in zip(tasks, graded, strict=True):
        for cell in ("all", f"grade {task.grade}", task.family, f"{task.family} {task.grade}"):
            cells[cell].append(right)
    return {
        "accuracy": {cell: [round(sum(v) / len(v), 4), len(v)] for cell, v in sorted(cells.items())},
        "mean_tokens": round(sum(count for _, count, _ in graded) / len(graded), 1),
    }


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    print(f"{'':20}{'all':>7}" + "".join(f"{'g' + str(g):>7}" for g in GRADES) + f"{'tokens':>8}")
    for name, row in rows.items():
        figures = [row["accuracy"].get(cell, [float("nan")])[0] for cell in ("all", *(f"grade {g}" for g in GRADES))]
        print(f"{name:20}" + "".join(f"{100 * f:7.1f}" for f in figures) + f"{row['mean_tokens']:8.1f}")


def _print_families(rows: dict[str, dict[str, Any]], tasks: Sequence[Task]) -> None:
    for name, row in rows.items():
        print(f"\n{name}\n{'':16}" + "".join(f"{'g' + str(g):>7}" for g in GRADES))
        for family in sorted({task.family for task in tasks}):
            cells = [row["accuracy"].get(f"{family} {g}", [float("nan")])[0] for g in GRADES]
            print(f"{family:16}" + "".join(f"{100 * c:7.1f}" for c in cells))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m backends.builtin.evaluate", description=__doc__)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--models", type=Path, default=MODELS_DIR)
    parser.add_argument("--uniform", action="store_true", help="as many tasks of each grade, not the natural mix")
    parser.add_argument("--runs", nargs="+", default=["1", "2", "3", "3t"], help="folders' tiers; t: thinking")
    parser.add_argument("--families", action="store_true", help="print accuracy by family and grade too")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--wrong", type=int, default=0, help="print this many wrong answers of each run")
    arguments = parser.parse_args()
    mix = UNIFORM_MIX if arguments.uniform else NATURAL_MIX
    tasks = list(generate(arguments.seed, arguments.tasks, split="test", mix=mix))
    rows: dict[str, dict[str, Any]] = {}
    for run in arguments.runs:
        started, thinking = time.monotonic(), run.endswith("t")
        folder = arguments.models / f"tier{run.rstrip('t')}"
        graded = grade_tier(folder, tasks, thinking=thinking, device=arguments.device, batch_size=arguments.batch_size)
        name = "tier 4 (3, thinking)" if run == "3t" else f"tier {run.rstrip('t')}" + (" thinking" if thinking else "")
        rows[name] = summarise(tasks, graded) | {"seconds": round(time.monotonic() - started, 1)}
        wrong = [(task, text) for task, (right, _, text) in zip(tasks, graded, strict=True) if not right]
        for task, text in wrong[: arguments.wrong]:
            print(f"{name} WRONG {task.prompt!r} expected {task.answer!r} got {text!r}")
    _print_table(rows)
    if arguments.families:
        _print_families(rows, tasks)
    if arguments.json:
        report = {"tasks": arguments.tasks, "seed": arguments.seed, "mix": dict(mix), "runs": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
