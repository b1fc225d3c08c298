"""Splits fresh tasks by problem: a fitting split and a holdout split, whatever the seeds."""

from __future__ import annotations

from itertools import islice

from backends.builtin.tasks.task_generator import generate
from backends.builtin.tasks.types import Task

FITTING_SPLIT = 0
HOLDOUT_SPLIT = 1

# Drawn at once; about half of them are kept.
_DRAWN_PER_KEPT = 3


def split_of(task: Task) -> int:
    """Return the split that a problem belongs to, whatever its wording.

    A task's id ends in its problem's digest. The lowest three bits made it a test problem; the next one decides here.
    """
    return int(task.task_id.rpartition("-")[2], 16) >> 3 & 1


def draw_split(half: int, seed: int, count: int) -> list[Task]:
    """The first ``count`` test-split tasks of the natural mix that a seed draws from one half; more extend fewer."""
    drawn = generate(seed, _DRAWN_PER_KEPT * count + 200, split="test")
    tasks = list(islice((task for task in drawn if split_of(task) == half), count))
    assert len(tasks) == count, "far fewer than half of the drawn tasks are of this half"
    return tasks
