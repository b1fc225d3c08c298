"""A ladder of known ability on the built-in tasks: what a router should find out, known exactly. For tests only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.builtin.tasks.task_generator import generate
from backends.builtin.tasks.types import Split, Task
from classifier.heads import sigmoid
from classifier.rows import Floats
from classifier.table import TrainingTable
from classifier.types import RouterRequest

ABILITY = np.array([2.0, 3.2, 4.6, 8.0])
"""The grade at which each tier is right half of the time; the top tier is about 95 % right on the hardest."""

COSTS = np.array([0.0001, 0.0005, 0.003, 0.01])


def probabilities(tasks: Sequence[Task]) -> Floats:
    """P(right) of each tier, float64 (n, 4)."""
    grades = np.array([task.grade for task in tasks], dtype=np.float64)
    shift = np.array([0.6 * (len(task.family) % 3 - 1) for task in tasks])
    return sigmoid(2.2 * (ABILITY - (grades + shift)[:, None]))


def request_of(prompt: str) -> RouterRequest:
    return RouterRequest(turns=(("user", prompt),))


def draw(num_tasks: int, seed: int, split: Split = "train") -> tuple[list[Task], Floats]:
    """Tasks of the natural mix, and whether each tier got them right."""
    tasks = list(generate(seed, num_tasks, split=split))
    scores = (np.random.default_rng(seed).random((num_tasks, 4)) < probabilities(tasks)).astype(np.float64)
    return tasks, scores


def table_of(tasks: Sequence[Task], scores: Floats) -> TrainingTable:
    return TrainingTable.build([request_of(task.prompt) for task in tasks], scores, window="simulated")
